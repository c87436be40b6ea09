"""Checkpoints as they are published, in their own storage: what is planned is what is taken."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.byte_tokenizer import END_OF_TEXT
from colibri.errors import UnsupportedModelError
from colibri.kernels import mapping
from colibri.kernels.library import unavailable_reason
from colibri.models.blueprint import Blueprint
from colibri.models.generate import generate
from colibri.models.published import published_model, published_models
from colibri.models.registry import get_family
from tests.conformance.cases import least_slots

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
# Billions of parameters, as their cards say.
PARAMETERS = {
    "glm-5.2-fp8": 744,
    "kimi-k2-thinking": 1026,
    "gpt-oss-120b": 116.8,
    "deepseek-v4-flash": 284,
    "qwen3.8-flash-next": 108.35,  # of the sizes that transformers has by default, with a 41B table
}
IDS = np.random.RandomState(5).randint(3, 264, 40).astype(np.int32)
each_model = pytest.mark.parametrize("name", published_models())


@each_model
def test_sizes_are_those_of_the_card(name: str) -> None:
    blueprint = Blueprint.of(published_model(name).sized())
    dense = sum(math.prod(each.shape) for each in blueprint.parameters())
    experts = sum(
        3 * each.hidden_size * each.intermediate_size * each.num_experts
        for each in blueprint.expert_layers()
    )
    assert (dense + experts) / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"known are deepseek-v4-flash, glm-5.2-fp8"):
        published_model("glm-9")


def taken_and_planned(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> LLM:
    """Open a model and compare every large block of memory with the plan; the caller closes it."""
    sizes: dict[str, int] = {}
    begin = mapping.Mapping.__init__

    def noted(self: mapping.Mapping, nbytes: int, what: str) -> None:
        sizes[what] = sizes.get(what, 0) + mapping.mapping_nbytes(nbytes)
        begin(self, nbytes, what)

    monkeypatch.setattr(mapping.Mapping, "__init__", noted)
    llm = LLM.open(path, context_length=128, **settings)
    plan = llm.plan()
    assert sizes.pop("dense weights") == plan.dense_bytes
    assert sizes.pop("expert slots") == mapping.mapping_nbytes(plan.slots_bytes)
    assert sizes.pop("staging buffers") == plan.staging_bytes
    assert sum(sizes.values()) == mapping.mapping_nbytes(plan.kv_bytes) + plan.recurrent_bytes
    return llm


@each_model
@pytest.mark.parametrize("rounded", [False, True])
def test_storage_runs_as_planned(
    name: str, rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family's smallest model in the storage of the published one, dense part rounded or not.

    Bits are the same with one layer's active experts in memory and with all of them.
    """
    published, path = published_model(name), tmp_path / "model"
    family = get_family(published.config["model_type"])
    config = family.tiny_config(eos_token_id=END_OF_TEXT)
    storage = {"experts": published.experts, "dense": published.dense}
    generate(path, config, **storage, published=True)
    asked = {"dense": "int8-g64"} if rounded else {}
    with taken_and_planned(path, monkeypatch, expert_slots="100%", **asked) as llm:
        expected = llm.logits(IDS)
        stored = {published.experts} | ({published.dense} if published.dense != "bf16" else set())
        assert stored <= {*llm.prepared.description.formats()}
    slots = least_slots(path)
    with taken_and_planned(path, monkeypatch, expert_slots=slots, prefill_chunk=7, **asked) as llm:
        assert np.array_equal(llm.logits(IDS), expected)
    assert np.isfinite(expected).all()


@pytest.mark.slow
@each_model
def test_real_sizes_run_as_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of the published sizes with 16 experts each: some 2 to 5 GB."""
    published, path = published_model(name), tmp_path / "model"
    storage = {"experts": published.experts, "dense": published.dense}
    generate(path, published.sized(2, 16), **storage, published=True)
    with taken_and_planned(path, monkeypatch, expert_slots="75%") as llm:
        assert llm.generate(IDS, max_tokens=4, ignore_eos=True).token_ids
        assert llm.metrics().peak_rss_bytes <= llm.plan().budget_bytes
