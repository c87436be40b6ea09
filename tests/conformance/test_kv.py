"""Every format of keys and values, in every family: the same bits in any chunks, and near f32."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.kernels.library import unavailable_reason
from colibri.models.family import Family
from colibri.models.plan import KV_FORMATS
from colibri.models.registry import all_families
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
IDS = np.random.RandomState(8).randint(3, 512, 80).astype(np.int32)  # more than one block
# Of the largest logit, in the usual row: what rounding keys and values to 24, 11, 8 and 7 bits may
# change. Rows in which an expert just misses being chosen change more, so that the median counts.
TOLERANCE = {"f32": 0.0, "f16": 2e-3, "bf16": 2e-2, "int8": 5e-2}


@pytest.fixture(scope="module", params=all_families(), ids=lambda f: f.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    return write_tiny(tmp_path_factory.mktemp(family.model_type) / "model", family)


def logits(model: Path, kv: str, chunk: int, kernels: str = "native") -> np.ndarray:
    settings = {"kv": kv, "prefill_chunk": chunk, "kernels": kernels, "expert_slots": "100%"}
    with LLM.open(model, activations="float32", **settings) as llm:
        found = llm.logits(IDS)
    return found


def deviation(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.median(np.abs(found - wanted).max(axis=1)) / np.abs(wanted).max())


@pytest.fixture(scope="module")
def exact(model: Path) -> np.ndarray:
    return logits(model, "f32", 64)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_rounding_is_bounded_and_does_not_depend_on_chunks(
    model: Path, exact: np.ndarray, kv: str
) -> None:
    found = logits(model, kv, 64)
    assert deviation(found, exact) <= TOLERANCE[kv]
    for chunk in (1, 13):
        assert np.array_equal(logits(model, kv, chunk), found)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_the_reference_rounds_alike(model: Path, kv: str) -> None:
    found, wanted = logits(model, kv, 64), logits(model, kv, 64, "reference")
    assert deviation(found, wanted) <= 2e-4 + TOLERANCE[kv] / 4


@pytest.mark.parametrize("kv", ["auto", *KV_FORMATS])
def test_what_is_lossy_is_said(model: Path, kv: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM.open(model, kv=kv) as llm:
        lossy = llm.metrics().lossy
    said = [message for message in caplog.messages if "lossy" in message]
    assert lossy == (("kv=int8",) if kv == "int8" else ())
    assert len(said) == len(lossy)
