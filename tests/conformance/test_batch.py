"""Requests computed together get the bits that each gets alone, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.engine.messages import Tokens
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.task import Listener
from colibri.kernels.library import unavailable_reason
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.conformance.cases import is_sparse, least_slots
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
DRAW = np.random.RandomState(5)
SYSTEM = DRAW.randint(3, 512, 70).tolist()
# Two that begin alike, one of several chunks, one of a token.
PROMPTS = [
    [*SYSTEM, *DRAW.randint(3, 512, 9).tolist()],
    [*SYSTEM, *DRAW.randint(3, 512, 3).tolist()],
    DRAW.randint(3, 512, 130).tolist(),
    [77],
]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=all_families(), ids=lambda f: f.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    return write_tiny(tmp_path_factory.mktemp(family.model_type) / "model", family)


class Heard:
    """The ids of one request, and the log probability of each: all that logits could change."""

    def __init__(self, llm: LLM, prompt: Sequence[int], *, n: int = 1, shared: bool = True) -> None:
        self.choices: list[tuple[list[int], list[float]]] = [([], []) for _ in range(n)]
        request = GenerateRequest(prompt=tuple(prompt), params=PARAMS, n=n, top_logprobs=0)
        self.task = llm.engine.submit(request, Listener(self._tell, _raise), shared=shared)

    def _tell(self, event: object) -> None:
        if isinstance(event, Tokens):
            ids, scores = self.choices[event.choice]
            ids += event.token_ids
            scores += [found.chosen for found in event.logprobs or ()]


def _raise(error: Exception) -> None:
    raise error


def run(llm: LLM) -> None:
    while llm.engine.step():
        pass


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[tuple[list[int], list[float]]]]:
    """Each prompt for itself, fresh, on one thread, with every expert in memory."""
    found = []
    with LLM.open(model, threads=1, prefill_chunk=64, expert_slots="100%") as llm:
        for prompt in PROMPTS:
            heard = Heard(llm, prompt, shared=False)
            run(llm)
            found.append(heard.choices)
    return found


@pytest.mark.parametrize(("threads", "slots", "chunk"), [(2, "50%", 16), (1, "least", 64)])
def test_together_as_alone(
    model: Path,
    alone: list[list[tuple[list[int], list[float]]]],
    threads: int,
    slots: str,
    chunk: int,
) -> None:
    """Fresh, from what the others left, and again in another order beside a request that leaves."""
    asked = (least_slots(model) if slots == "least" else slots) if is_sparse(model) else "100%"
    settings = {"threads": threads, "expert_slots": asked, "prefill_chunk": chunk}
    with LLM.open(model, max_sessions=4, **settings) as llm:
        first = [Heard(llm, prompt) for prompt in PROMPTS]
        run(llm)
        assert [heard.choices for heard in first] == alone
        leaves = Heard(llm, PROMPTS[2][::-1])
        again = [Heard(llm, prompt) for prompt in PROMPTS[:2]]
        llm.engine.step()
        llm.engine.step(lambda: llm.engine.cancel(leaves.task))
        run(llm)
        assert [heard.choices for heard in again] == alone[:2]
        assert llm.metrics().reused_tokens > 2 * len(SYSTEM)


def test_replies_to_one_prompt(model: Path) -> None:
    """The first is the one that is given alone; the others differ by their random numbers only."""
    found = []
    for sessions in (2, 3):
        with LLM.open(model, max_sessions=sessions, prefill_chunk=32) as llm:
            several = Heard(llm, PROMPTS[0], n=sessions)
            run(llm)
            found.append(several.choices)
            assert llm.metrics().prompt_tokens == len(PROMPTS[0])
    assert found[1][:2] == found[0]
