"""Heads that draft further tokens compute what transformers computes, however the pass is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import IncompleteModelError, RequestError, UnsupportedModelError
from colibri.kernels.library import unavailable_reason
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.conformance.cases import GOLDENS, SHARED, is_known, least_slots
from tests.tiny import PLAIN, num_heads, write_tiny

DRAFTING = tuple(family for family in all_families() if family.mtp)
LAYOUTS = sorted(path for path in SHARED.glob("layout/*-mtp") if is_known(path))
EXACT = {"activations": "float32", "kv": "f32"}
KERNELS = ["reference", *([] if unavailable_reason() else ["native"])]


@pytest.fixture(scope="module", params=DRAFTING, ids=lambda family: family.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp("heads") / family.model_type
    return write_tiny(folder, family, heads=num_heads(family))


@pytest.mark.parametrize("kernels", KERNELS)
def test_heads_compute_what_the_oracle_computes(model: Path, kernels: str) -> None:
    golden = np.load(GOLDENS / f"{model.name}.mtp.npz")
    with LLM.open(model, mtp=True, kernels=kernels, **EXACT) as llm:
        found = llm.mtp_logits(golden["ids"])
        layers = len(llm.prepared.description.blueprint.layers)
        assert llm.plan().num_experts == sum(
            layout.num_experts for layout in llm.prepared.description.experts.layers
        )
        assert llm.prepared.description.experts.layers[-1].layer == layers + len(found) - 1
    assert len(found) == len(golden.files) - 1
    for number, logits in enumerate(found):
        wanted = golden[f"logits.{number}"]
        assert logits.shape == wanted.shape == (len(golden["ids"]) - 1 - number, 512)
        assert np.abs(logits - wanted).max() <= 2e-4 * np.abs(wanted).max()


@pytest.mark.skipif("native" not in KERNELS, reason=f"native kernels: {unavailable_reason()}")
def test_heads_have_the_same_bits_in_any_chunks_and_slots(model: Path) -> None:
    ids = np.random.RandomState(3).randint(3, 512, 20).astype(np.int32)
    with LLM.open(model, mtp=True, expert_slots="100%") as llm:
        expected, plain = llm.mtp_logits(ids), llm.logits(ids)
    with LLM.open(model, mtp=True, expert_slots=least_slots(model), prefill_chunk=3) as llm:
        for found, wanted in zip(llm.mtp_logits(ids), expected, strict=True):
            assert np.array_equal(found, wanted)
        assert np.array_equal(llm.logits(ids), plain)
    with LLM.open(model) as llm:
        assert np.array_equal(llm.logits(ids), plain)  # they change nothing of the model
        assert sum(llm.prepared.description.left_aside.values()) > 0
        with pytest.raises(RequestError, match="open it with mtp"):
            llm.mtp_logits(ids)


def test_heads_may_be_rounded_as_the_rest(model: Path) -> None:
    ids = np.arange(3, 13, dtype=np.int32)
    with LLM.open(model, mtp=True, dense="int8-g64", experts="int4-g64") as llm:
        names = {t.parameter.name: t.resident.name for t in llm.prepared.description.dense}
        assert names["mtp.layers.0.eh_proj.weight"] == "int8-g64"
        assert len(llm.mtp_logits(ids)) == len(llm._model.heads)  # type: ignore[union-attr]


@pytest.mark.skipif(not LAYOUTS, reason="the fixtures do not lie beside this checkout")
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_fixtures_with_heads(case: Path) -> None:
    golden = np.load(GOLDENS / f"{case.name}.npz")
    with LLM.open(case, mtp=True, heat=False, **EXACT) as llm:
        found = llm.mtp_logits(golden["ids"])
        copies = llm.prepared.description.ignored
    assert all(name.endswith(("embed_tokens.weight", "shared_head.head.weight")) for name in copies)
    wanted = golden["logits.0"]
    assert np.abs(found[0] - wanted).max() <= 2e-4 * np.abs(wanted).max()


def test_short_prompts(model: Path) -> None:
    with LLM.open(model, mtp=True) as llm:
        for length in (1, 2, 3):
            shapes = [x.shape[0] for x in llm.mtp_logits(np.arange(3, 3 + length))]
            assert shapes == [max(0, length - 1 - k) for k in range(len(shapes))]


def test_heads_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for family in (PLAIN, DRAFTING[0]):
        path = write_tiny(tmp_path / family.model_type, family)
        with pytest.raises(IncompleteModelError, match="holds no heads"):
            LLM.open(path, mtp=True)
    with pytest.raises(UnsupportedModelError, match="drafting heads of mixtral are not implem"):
        Blueprint.of(PLAIN.tiny_config()).with_heads(1)
