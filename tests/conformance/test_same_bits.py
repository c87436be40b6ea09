"""Placement changes speed, never a bit of the logits, with the default numerics.

Slots x prefill chunk x threads x format.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.kernels.library import unavailable_reason
from colibri.models.convert import convert_model
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.conformance.cases import is_sparse, least_slots
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
FORMATS = ("int4-g64", "int8-g64", "bf16")
IDS = np.random.RandomState(7).randint(3, 512, 40).astype(np.int32)


@pytest.fixture(scope="module", params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=all_families(), ids=lambda f: f.model_type)
def model(
    request: pytest.FixtureRequest, fmt: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model of each family in each format; integer ones are converted containers."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(f"{family.model_type}-{fmt}")
    wide = {"hidden_size": 128, "num_attention_heads": 4}
    if fmt == "bf16":
        return write_tiny(folder / "model", family, dtype=fmt, **wide)
    source = write_tiny(folder / "source", family, **wide)
    convert_model(source, folder / "model", experts=fmt, dense=fmt)
    return folder / "model"


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    with LLM.open(model, expert_slots="100%", threads=1, prefill_chunk=64) as llm:
        return llm.logits(IDS)


@pytest.mark.parametrize(("chunk", "threads"), [(1, 2), (2, 1), (3, 2), (7, 1), (64, 2)])
def test_chunks_and_threads(model: Path, expected: np.ndarray, chunk: int, threads: int) -> None:
    with LLM.open(model, expert_slots="50%", prefill_chunk=chunk, threads=threads) as llm:
        assert np.array_equal(llm.logits(IDS), expected)


@pytest.mark.parametrize(("chunk", "extra"), [(1, 0), (7, 1), (64, 0)])
def test_least_slots(model: Path, expected: np.ndarray, chunk: int, extra: int) -> None:
    sparse = is_sparse(model)
    slots = least_slots(model) + extra if sparse else "100%"
    with LLM.open(model, expert_slots=slots, prefill_chunk=chunk) as llm:
        assert np.array_equal(llm.logits(IDS), expected)
        traffic = llm.metrics().experts
        assert traffic.hits + traffic.misses == traffic.requests
        assert (traffic.misses > 0) == sparse


def test_decode_equals_prefill(model: Path, expected: np.ndarray) -> None:
    """Greedy decoding, token by token, sees the logits of the teacher-forced pass."""
    with LLM.open(model, expert_slots="25%") as llm:
        new = llm.generate(IDS, max_tokens=8, temperature=0, ignore_eos=True).token_ids
        forced = llm.logits(np.append(IDS, np.array(new, np.int32)))
    assert np.array_equal(forced[: len(IDS)], expected)
    assert forced[len(IDS) - 1 : -1].argmax(axis=1).tolist() == new
