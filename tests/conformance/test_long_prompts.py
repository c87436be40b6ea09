"""Prompts of 1,500 tokens, on which wrong ropes, windows, selections and scales show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.kernels.library import unavailable_reason
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from tests.conformance.cases import GOLDENS
from tests.tiny import FAMILIES, write_tiny

LONG = 1500
CASES = [f for f in FAMILIES if (GOLDENS / f"{f.model_type}.long.npz").is_file()]


@pytest.mark.parametrize("family", CASES, ids=lambda family: family.model_type)
@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
def test_a_long_prompt_ends_as_with_the_oracle(family: Family, tmp_path: Path) -> None:
    golden = np.load(GOLDENS / f"{family.model_type}.long.npz")
    model = write_tiny(tmp_path / "model", family, max_position_embeddings=2 * LONG)
    vocab_size = Blueprint.of(family.tiny_config()).config.num_ids
    ids = np.random.RandomState(int(golden["seed"])).randint(3, vocab_size, LONG).astype(np.int32)
    greedy = golden["greedy_ids"].tolist()
    with LLM.open(model, activations="float32", kv="f32", prefill_chunk=500) as llm:
        with llm.open_session() as session:
            found = llm.generate(
                ids, max_tokens=len(greedy), temperature=0, ignore_eos=True, session=session
            ).token_ids
        last = llm.logits(ids)[-1]
    wanted = golden["logits"]
    assert np.abs(last - wanted).max() <= 2e-4 * np.abs(wanted).max()
    assert list(found) == greedy
