"""The facade over a real checkpoint: what only holds when all layers work together."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, NativeLibraryError, SettingsError, TextError
from colibri.llm.heat_keeper import open_usage
from colibri.models.description import Description

PROMPT = [17, 200, 3, 88, 45, 45, 9, 120, 33, 7]


def free_blocks(llm: LLM) -> int:
    model = llm._model
    assert model is not None
    return model.kv.num_free


def test_greedy_ids_are_the_largest_logits(tiny: Path) -> None:
    with LLM.open(tiny) as llm:
        reply = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
        logits = llm.logits([*PROMPT, *reply.token_ids])
    assert logits[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() == reply.token_ids


@pytest.mark.parametrize("options", [{"prefill_chunk": 3}, {"expert_slots": 4}, {"threads": 1}])
def test_placement_changes_no_bit(tiny: Path, options: dict[str, Any]) -> None:
    with LLM.open(tiny) as llm:
        expected = llm.logits(PROMPT)
    with LLM.open(tiny, **options) as llm:
        assert np.array_equal(llm.logits(PROMPT), expected)


def test_a_session_changes_no_bit(tiny: Path) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    with LLM.open(tiny) as llm:
        fresh = [llm.generate(ids, **sampled).token_ids for ids in (PROMPT, PROMPT[:4])]
        with llm.open_session() as session:
            kept = [
                llm.generate(ids, session=session, **sampled).token_ids
                for ids in (PROMPT, PROMPT[:4])
            ]
            again = llm.generate(PROMPT, session=session, **sampled)
    assert kept == fresh
    assert again.token_ids == fresh[0]
    assert again.metrics.reused_tokens == 4


def test_books_balance_and_blocks_come_back(tiny: Path) -> None:
    with LLM.open(tiny, expert_slots=6) as llm:
        before = free_blocks(llm)
        reply = llm.generate(PROMPT, max_tokens=5, ignore_eos=True)
        for _ in llm.stream(PROMPT):
            break
        assert free_blocks(llm) == before
        own, total = reply.metrics.experts, llm.metrics().experts
        assert own.requests == own.hits + own.misses > 0
        assert total.requests == total.hits + total.misses > own.requests
        assert own.bytes_read == own.misses * llm.plan().record_bytes
        assert llm.metrics().peak_rss_bytes <= llm.metrics().ram_budget_bytes


def test_a_stream_that_outlives_the_model_ends(tiny: Path) -> None:
    with LLM.open(tiny) as llm:
        stream = llm.stream(PROMPT, ignore_eos=True)
        next(stream)
    rest = list(stream)
    assert [chunk.finish_reason for chunk in rest] == ["cancelled"]


def test_a_directory_without_tokenizer_opens_for_ids(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "ids"
    shutil.copytree(tiny, directory, ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM.open(directory) as llm, LLM.open(tiny) as other:
        reply = llm.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert reply.text is None
        same = other.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert reply.token_ids == same.token_ids
        with pytest.raises(TextError, match="needs a tokenizer"):
            llm.generate("hi")


def test_the_model_may_come_from_the_environment(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_MODEL", str(tiny))
    stages: list[str] = []
    with LLM.open(progress=lambda stage, *_: stages.append(stage)) as llm:
        assert llm.settings.model == str(tiny)
        assert llm.generate("hi", max_tokens=1).completion_tokens == 1
    assert stages[0] == f"opening {tiny}"
    assert len(set(stages)) > 1


def test_the_slow_reference_is_told_once_when_a_model_is_opened(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("colibri.kernels.library.unavailable_reason", lambda: "no C compiler")
    with LLM.open(tiny) as llm:
        llm.generate([1], max_tokens=1)
    assert caplog.messages == ["running on the slow NumPy reference: no C compiler"]
    with pytest.raises(NativeLibraryError, match="this installation has none: no C compiler"):
        LLM.open(tiny, kernels="native")


def test_more_threads_than_cpus_are_told(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("colibri.llm.loading.affinity_cpus", lambda: 1)
    with LLM.open(tiny, threads=2) as llm:
        assert "native" not in repr(llm) or "2 threads share 1 CPUs" in caplog.text
    with pytest.raises(SettingsError, match="may use 1 CPU: ask for at most 4"):
        LLM.open(tiny, threads=5)


def test_it_describes_itself_and_memory_is_in_its_metrics(tiny: Path) -> None:
    with LLM.open(tiny, expert_slots="100%") as llm:
        slots = llm.plan().num_slots
        assert f"{slots} of {slots} experts in memory" in repr(llm)
        own = llm.generate([1], max_tokens=1).metrics
        assert 0 < own.rss_bytes <= own.peak_rss_bytes
        assert own.ram_budget_bytes == llm.plan().budget_bytes
    assert "closed" in repr(llm)


def test_a_model_that_vanishes_while_it_is_opened(tiny: Path) -> None:
    description = Description.of(Checkpoint.open(tiny))
    gone = replace(description.checkpoint, directory=tiny / "gone")
    with pytest.raises(CheckpointError, match="leave the model in place"):
        open_usage(replace(description, checkpoint=gone))
