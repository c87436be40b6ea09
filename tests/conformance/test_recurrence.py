"""What a sequence kept never shows in another, nor in its own next prompt; and long prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.engine.session import Session
from colibri.kernels.library import unavailable_reason
from colibri.models import qwen3_next
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.tiny import write_tiny

NATIVE = unavailable_reason() is None
LONG = 1500
DRAW = np.random.RandomState(9)
A, B = (DRAW.randint(3, 512, size).astype(np.int32) for size in (70, 33))
# What A, B and A' are: A' turns off inside A, and a fourth goes on where A's reply ended.
TURNED = np.concatenate([A[:50], B[:9]])


@pytest.fixture(params=all_families(), ids=lambda f: f.model_type)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family: Family = request.param
    return write_tiny(tmp_path, family, max_position_embeddings=2048)


def answer(llm: LLM, prompt: np.ndarray, session: Session) -> tuple[list[int], np.ndarray]:
    """Eight greedy ids, and the logits after them."""
    done = llm.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True, session=session)
    assert done.token_ids is not None
    new = np.array(done.token_ids[-1:], np.int32)
    missing = len(prompt) + 8 - session.position
    assert missing in (0, 1)
    last = new if missing else np.array([7], np.int32)
    return done.token_ids, session.extend(last, np.zeros(1, np.int32))[0]


def fresh(path: Path, prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
    """What a new engine answers."""
    with LLM.open(path, prefill_chunk=16) as llm, llm.open_session() as session:
        return answer(llm, prompt, session)


def after(calls: int) -> Callable[[], bool]:
    """True from the next call after so many on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def same(found: tuple[list[int], np.ndarray], wanted: tuple[list[int], np.ndarray]) -> bool:
    """The same ids; the same bits of logits on native kernels."""
    near = np.array_equal if NATIVE else np.allclose
    return found[0] == wanted[0] and near(found[1], wanted[1])


def test_one_session_answers_as_new_ones_do(path: Path) -> None:
    with LLM.open(path, prefill_chunk=16) as llm, llm.open_session() as session:
        for prompt in (A, B, TURNED, A, A):
            assert same(answer(llm, prompt, session), fresh(path, prompt))


def test_sessions_of_one_engine_answer_as_new_ones_do(path: Path) -> None:
    """Two at once, taking turns."""
    with (
        LLM.open(path, prefill_chunk=16) as llm,
        llm.open_session() as first,
        llm.open_session() as second,
    ):
        for prompt, session in ((A, first), (B, second), (TURNED, first), (A, second)):
            assert same(answer(llm, prompt, session), fresh(path, prompt))


def test_a_cancelled_prompt_leaves_nothing_behind(path: Path) -> None:
    """Given up between any two layers of a later chunk, then asked again."""
    wanted = fresh(path, A)
    with LLM.open(path, prefill_chunk=16) as llm, llm.open_session() as session:
        for asked in (1, 5, 6, 8):
            done = llm.generate(A, max_tokens=8, session=session, cancelled=after(asked))
            assert done.finish_reason == "cancelled"
            assert same(answer(llm, A, session), wanted)
            session.rewind(0)


@pytest.mark.skipif(not NATIVE, reason="the reference owes no bits")
def test_a_long_prompt_in_other_chunks(path: Path) -> None:
    """Windows, splits of keys and recurrences far from the start."""
    ids = np.random.RandomState(3).randint(3, 512, LONG).astype(np.int32)

    def logits(chunk: int) -> np.ndarray:
        with LLM.open(path, prefill_chunk=chunk, context_length=LONG) as llm:
            return llm.logits(ids)

    assert np.array_equal(logits(63), logits(512))


def test_a_model_whose_layers_keep_nothing_that_grows(tmp_path: Path) -> None:
    """Blocks of no bytes still count positions."""
    kinds = ["linear_attention"] * 3
    path = write_tiny(tmp_path, qwen3_next.FAMILY, layer_types=kinds)
    with LLM.open(path, prefill_chunk=16) as llm, llm.open_session() as session:
        assert llm.plan().context_length == 256
        assert same(answer(llm, A, session), fresh(path, A))
