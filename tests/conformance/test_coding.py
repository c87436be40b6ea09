"""A model rounded while it is loaded is the one that `convert` writes, whatever fits in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import UnsupportedModelError
from colibri.kernels.library import unavailable_reason
from colibri.kernels.mapping import mapping_nbytes
from colibri.models.convert import convert_model
from colibri.models.family import Family
from tests.conformance.cases import is_sparse, least_slots
from tests.tiny import PLAIN, each_family, write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
IDS = np.random.RandomState(7).randint(3, 512, 20).astype(np.int32)
DENSE, EXPERTS = "int8-g64", "int4-g64"


@each_family
def test_every_family_is_rounded_as_convert_rounds(family: Family, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "from", family, dtype="bf16")
    convert_model(model, tmp_path / "to", experts=EXPERTS, dense=DENSE)
    with LLM.open(tmp_path / "to", kv="f32") as llm:
        expected = llm.logits(IDS)
    experts = EXPERTS if is_sparse(model) else None
    lossy = (f"dense={DENSE}", *([f"experts={EXPERTS}"] if experts else []))
    for slots, chunk in (("100%", 64), (least_slots(model) or "100%", 3)):
        with LLM.open(
            model, dense=DENSE, experts=EXPERTS, kv="f32", expert_slots=slots, prefill_chunk=chunk
        ) as llm:
            assert np.array_equal(llm.logits(IDS), expected)
            assert llm.metrics().lossy == lossy


@pytest.mark.parametrize(
    ("dense", "experts"), [(DENSE, None), (None, EXPERTS)], ids=["dense", "experts"]
)
@pytest.mark.parametrize("stored", ["bf16", "fp8-e4m3-b128"])
def test_containers_are_rounded_too(
    stored: str, dense: str | None, experts: str | None, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", PLAIN, dtype="bf16")
    convert_model(source, tmp_path / "from", experts=stored, dense=stored)
    convert_model(tmp_path / "from", tmp_path / "to", experts=experts, dense=dense)
    found = []
    for path, asked in ((tmp_path / "to", (None, None)), (tmp_path / "from", (dense, experts))):
        with LLM.open(path, dense=asked[0], experts=asked[1], kv="f32", expert_slots="50%") as llm:
            found.append(llm.logits(IDS))
    assert np.array_equal(*found)


def test_the_plan_is_what_is_allocated(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", PLAIN, dtype="bf16")
    plans = []
    for asked in ({}, {"dense": DENSE, "experts": EXPERTS}):
        with LLM.open(model, expert_slots="100%", **asked) as llm:
            plan, store = llm.plan(), llm._model.store  # type: ignore[union-attr]
            arena = store._arena
            dense = sum(t.resident_nbytes for t in llm.prepared.description.dense)
            assert plan.dense_bytes == mapping_nbytes(dense)
            assert plan.slots_bytes == arena.data.size
            assert plan.staging_bytes == mapping_nbytes(arena.staging.size)
            plans.append((dense, arena.data.size, plan.bytes_per_token_cold))
    assert plans[1][0] < 0.7 * plans[0][0]
    assert plans[1][1] < 0.5 * plans[0][1]
    assert plans[1][2] == plans[0][2]  # of the disk


def test_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_tiny(tmp_path / "m", PLAIN, dtype="bf16")
    with caplog.at_level(logging.WARNING), LLM.open(model, dense=DENSE, experts=EXPERTS):
        pass
    said = [text for text in caplog.messages if "lossy" in text]
    assert [text.split()[0] for text in said] == [f"dense={DENSE}", f"experts={EXPERTS}"]


def test_what_changes_nothing_is_not_lossy_and_codes_are_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", PLAIN)
    convert_model(source, tmp_path / "m", experts=EXPERTS, dense=DENSE)
    with LLM.open(tmp_path / "m", dense=DENSE, experts=EXPERTS) as llm:
        assert llm.metrics().lossy == ()
    with pytest.raises(UnsupportedModelError, match="gate_proj of layer 0 is int4-g64"):
        LLM.open(tmp_path / "m", experts="int8-g64")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.* a second time"):
        LLM.open(tmp_path / "m", dense="int4-g64")
