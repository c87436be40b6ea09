"""Layers that see a window keep no more than it and 256 positions, and no bit changes by that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.kernels.library import unavailable_reason
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
LONG = 1 << 20


def num_kept(family: Family) -> int:
    """Blocks of windows that a cell of the tiny model keeps."""
    return max(shape.num_kept for shape in Blueprint.of(family.tiny_config()).states(LONG))


WINDOWED = [family for family in all_families() if num_kept(family)]
IDS = np.random.RandomState(6).randint(3, 512, 1300).astype(np.int32)


@pytest.fixture(scope="module", params=WINDOWED, ids=lambda f: f.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    assert 3 * 64 * num_kept(family) <= 1300
    folder = tmp_path_factory.mktemp(family.model_type) / "model"
    return write_tiny(folder, family, max_position_embeddings=4096)


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_what_is_kept_changes_no_bit(model: Path, kv: str) -> None:
    """One context is just too short for windows to pay, so that all positions are kept."""
    with LLM.open(model, context_length=1100, kv=kv) as llm:
        everything, whole = llm.logits(IDS[:1100]), llm.plan()
    with LLM.open(model, context_length=1300, kv=kv) as llm:
        found, plan = llm.logits(IDS), llm.plan()
    assert np.array_equal(found[:1100], everything)
    assert plan.kv_bytes / plan.num_kv_blocks < whole.kv_bytes / whole.num_kv_blocks
    assert plan.num_cells


def test_long_conversations_turn_back_and_go_on(model: Path, tmp_path: Path) -> None:
    """Within the slack, to a snapshot, to the start, and from the disk: what new ones answer."""
    prompts = [IDS[:1000], IDS[:1003], np.append(IDS[:990], IDS[:20]), IDS[:400], IDS[:1000]]
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    wanted = []
    for prompt in prompts:
        with LLM.open(model) as llm:
            wanted.append(llm.generate(prompt, **asked).token_ids)
    with LLM.open(model, session_dir=tmp_path) as llm, llm.open_session() as session:
        found = [llm.generate(prompt, session=session, **asked) for prompt in prompts]
    assert [done.token_ids for done in found] == wanted
    with LLM.open(model, session_dir=tmp_path) as llm:
        again = llm.generate(prompts[0], **asked)
        assert again.metrics.reused_tokens == 999
        assert again.token_ids == wanted[0]


def test_prompts_that_begin_alike_share_what_is_still_there(model: Path) -> None:
    """The whole reply may be asked for again, or another one after the same prompt."""
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with LLM.open(model) as llm, llm.open_session() as session:
        first = llm.generate(IDS[:700], session=session, **asked)
        again = llm.generate(IDS[:700], session=session, **asked)
        assert again.token_ids == first.token_ids
        assert again.metrics.reused_tokens == 699
