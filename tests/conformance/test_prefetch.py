"""Reading ahead changes speed, never a bit; every byte it reads is accounted for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.models.family import Family
from tests.conformance.cases import least_slots, record_nbytes
from tests.tiny import SPARSE, write_tiny

IDS = np.random.RandomState(11).randint(3, 512, 24).astype(np.int32)
SPARE = (
    (0, "mixed"),
    (1, "lru"),
    (4, "mixed"),
    (4, "lru"),
    (12, "mixed"),
)  # slots beside the least


@pytest.fixture(scope="module", params=SPARSE, ids=lambda f: f.model_type)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp(family.model_type), family)


def answer(llm: LLM) -> tuple[np.ndarray, list[int]]:
    """Logits of steps of two tokens, and greedy tokens one by one."""
    logits = llm.logits(IDS)
    return logits, list(llm.generate(IDS, max_tokens=12, temperature=0, ignore_eos=True).token_ids)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[np.ndarray, list[int]]:
    with LLM.open(model, prefetch="off", expert_slots="100%", prefill_chunk=2, heat=False) as llm:
        return answer(llm)


@pytest.mark.parametrize(("spare", "eviction"), SPARE)
def test_same_bits_and_true_books(
    family: Family, model: Path, expected: tuple[np.ndarray, list[int]], spare: int, eviction: str
) -> None:
    slots = least_slots(model) + spare
    with LLM.open(
        model,
        prefetch="on",
        expert_slots=slots,
        prefill_chunk=2,
        heat=False,
        eviction=eviction,
    ) as llm:
        assert llm.plan().num_slots == slots
        logits, tokens = answer(llm)
        store = llm._model.store  # type: ignore[union-attr]
        stats, counts = store.stats, llm.metrics()
        waiting = stats.predicted.waiting
        store.close()  # nothing is in flight any more
    assert np.array_equal(logits, expected[0])
    assert tokens == expected[1]
    assert stats.hits + stats.misses == stats.requests
    assert counts.prefetch_recall is not None
    assert 0 < counts.prefetch_recall < 1
    ahead = stats.predicted
    assert (ahead.failed, stats.warmed.read) == (0, 0)
    assert waiting >= 0
    ended = ahead.useful + ahead.late + ahead.wasted + ahead.withdrawn
    assert ahead.read == ended + waiting
    assert (ahead.useful + ahead.late > 0) == (spare > 1)
    read = store.stats
    record = record_nbytes(family)
    cancelled = stats.prefetched + stats.misses - stats.withdrawn - read.records
    assert 0 <= cancelled <= waiting // record
    assert read.bytes_read == read.records * record


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_model_that_fits_is_read_in_the_background(
    model: Path, expected: tuple[np.ndarray, list[int]], mode: str
) -> None:
    with LLM.open(
        model, prefetch=mode, expert_slots="100%", prefill_chunk=2, heat=False, warm_start=True
    ) as llm:
        logits, tokens = answer(llm)
        counts, plan = llm.metrics().experts, llm.plan()
    assert np.array_equal(logits, expected[0])
    assert tokens == expected[1]
    assert (counts.misses, counts.prefetched) == (0, plan.num_experts)
