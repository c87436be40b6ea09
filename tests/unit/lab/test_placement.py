"""Policies and heat change what is read, never what is computed."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.memory.policies import EVICTIONS
from colibri.memory.usage import NAME
from tests.tiny import PLAIN, write_tiny

pytestmark = pytest.mark.usefixtures("heat_on")
IDS = np.random.RandomState(5).randint(3, 512, 24).astype(np.int32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", PLAIN)


def counted(model: Path) -> float:
    """All the heat that the file holds."""
    lines = (model / NAME).read_text().splitlines()
    return sum(float(line.split()[2]) for line in lines[1:-1])


def test_the_same_bits_with_every_policy_cold_and_warm(model: Path) -> None:
    with LLM.open(model, expert_slots="100%") as llm:
        expected = llm.logits(IDS)
    for eviction in EVICTIONS:
        for warm_start in (True, False):
            with LLM.open(
                model,
                expert_slots="40%",
                prefill_chunk=5,
                eviction=eviction,
                warm_start=warm_start,
            ) as llm:
                assert np.array_equal(llm.logits(IDS), expected)
                traffic = llm.metrics().experts
            assert traffic.hits + traffic.misses == traffic.requests
            assert traffic.misses > 0


def test_a_warm_start_turns_misses_into_hits(model: Path) -> None:
    def misses(**settings: object) -> int:
        with LLM.open(model, expert_slots="60%", prefill_chunk=1, **settings) as llm:  # type: ignore[arg-type]
            llm.logits(IDS[:4])
            return llm.metrics().experts.misses

    cold = misses()
    assert misses(warm_start=False) == cold
    assert misses() < cold


def test_heat_is_saved_after_every_answer(model: Path) -> None:
    with LLM.open(model) as llm:
        assert not (model / NAME).exists()
        llm.generate(IDS, max_tokens=4, ignore_eos=True)
        first = counted(model)
        llm.generate(IDS, max_tokens=4, ignore_eos=True)
        second = counted(model)
        llm.logits(IDS)
        assert counted(model) == second
        requests = llm.metrics().experts.requests
    assert 0 < first < second < counted(model)
    assert counted(model) == pytest.approx(requests, rel=0.01)
    assert llm.notes == ()


def test_an_answer_cut_short_counts_too(model: Path) -> None:
    with LLM.open(model) as llm:
        with llm.stream(IDS, max_tokens=8, ignore_eos=True) as stream:
            next(stream)
        assert counted(model) > 0


KILLED = """
import os, signal, sys
from colibri import LLM
with LLM.open(sys.argv[1]) as llm:
    llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
    stream = llm.stream([5, 6, 7], max_tokens=40, ignore_eos=True)
    next(stream)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_its_last_answer_only(model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(model)], check=False)
    assert done.returncode == -signal.SIGKILL
    killed = counted(model)
    (model / NAME).unlink()
    with LLM.open(model) as llm:
        llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
    assert killed == counted(model) > 0


def test_a_changed_model_does_not_use_the_heat_of_the_old_one(model: Path) -> None:
    with LLM.open(model) as llm:
        llm.generate(IDS, max_tokens=2)
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    with LLM.open(model) as llm:
        llm.generate(IDS, max_tokens=2)
        (note,) = llm.notes
    assert "belongs to another model" in note
