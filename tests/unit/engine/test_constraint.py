"""Replies that are restricted to a language, and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri.engine.logprobs import logprobs_of
from colibri.engine.messages import Logprobs, Tokens
from colibri.engine.request import FinishReason, SamplingParams
from colibri.errors import RequestError
from tests.unit.engine.counter import VOCAB, CounterModel
from tests.unit.engine.test_scheduler import Heard, ask, batching, run


class Script:
    """Allows the sets of ids that a list spells, one for each token; forces those of one id."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._sets: list[list[int]] = [list(allowed) for allowed in spec["sets"]]
        self._forces = spec.get("forces", True)
        self._at = 0

    def mask(self) -> NDArray[np.bool_]:
        allowed = np.zeros(VOCAB, np.bool_)
        allowed[self._sets[self._at]] = True
        return allowed

    def accept(self, token: int) -> None:
        assert token in self._sets[self._at]
        self._at += 1

    def forced(self) -> Sequence[int]:
        found = []
        for allowed in self._sets[self._at :]:
            if len(allowed) != 1 or not self._forces:
                break
            found += allowed
        return found

    @property
    def is_finished(self) -> bool:
        return self._at == len(self._sets)


SETS = [[5, 9], [20], [21], [30, 11], [12], [13]]


def constrained(
    model: CounterModel, sets: Any = SETS, *, forces: bool = True, **more: Any
) -> Heard:
    engine = batching(model, constraints=Script, eos_ids=frozenset({300}))
    heard = ask(engine, [8], constraint={"sets": sets, "forces": forces}, **more)
    run(engine)
    return heard


def test_only_what_is_allowed_is_chosen() -> None:
    model = CounterModel()
    heard = constrained(model, params=SamplingParams())
    assert heard.tokens()[:3] == [9, 20, 21]
    assert heard.tokens()[4:] == [12, 13]
    assert heard.reason() is FinishReason.STOP
    assert model.passes == [1, 3]  # what was forced costs no pass of its own, the end none at all


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_forcing_saves_passes_and_changes_nothing(top: int | None, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, frequency_penalty=0.5)
    quick, slow = CounterModel(), CounterModel()
    forced = constrained(quick, params=params, top_logprobs=top)
    chosen = constrained(slow, forces=False, params=params, top_logprobs=top)
    assert forced.tokens() == chosen.tokens()
    assert len(quick.passes) < len(slow.passes)
    assert scores(forced) == scores(chosen)


def scores(heard: Heard) -> list[Logprobs]:
    found = [event for event in heard.events if isinstance(event, Tokens)]
    assert all(e.logprobs is None or len(e.logprobs) == len(e.token_ids) for e in found)
    return [score for event in found for score in event.logprobs or ()]


@pytest.mark.parametrize("most", [1, 2, 4, 5])
def test_max_tokens_cuts_what_is_forced(most: int) -> None:
    heard = constrained(CounterModel(), params=SamplingParams(max_tokens=most), top_logprobs=0)
    assert len(heard.tokens()) == len(scores(heard)) == most
    assert heard.reason() is FinishReason.LENGTH


def test_a_stop_id_ends_what_is_forced() -> None:
    heard = constrained(CounterModel(), [[9], [300], [5]], params=SamplingParams())
    assert (heard.tokens(), heard.reason()) == ([9, 300], FinishReason.STOP)


def test_a_dead_end_is_an_error() -> None:
    heard = constrained(CounterModel(), [[9], []], params=SamplingParams())
    assert isinstance(heard.error, RequestError)
    assert "allows no token" in str(heard.error)


def test_a_constraint_that_cannot_be_built_is_refused_at_once() -> None:
    def refuse(spec: Mapping[str, Any]) -> Any:
        raise RequestError(f"constraint {sorted(spec)} is unknown")

    with pytest.raises(RequestError, match=r"\['magic'\] is unknown"):
        ask(batching(CounterModel(), constraints=refuse), [1], constraint={"magic": 1})
    with pytest.raises(RequestError, match="nothing that builds one"):
        ask(batching(CounterModel()), [1], constraint={"regex": "a"})


def test_log_probabilities_are_those_of_the_model() -> None:
    model = CounterModel()
    engine = batching(model)
    params = SamplingParams(temperature=0.3, seed=1, logit_bias={7: 50}, max_tokens=2)
    heard = ask(engine, [1], params, top_logprobs=3)
    plain = ask(engine, [1], SamplingParams(max_tokens=1), top_logprobs=20)
    run(engine)
    assert heard.tokens() == [7, 7]
    biased, usual = scores(heard)[0], scores(plain)[0]
    assert biased.top == usual.top[:3]
    assert biased.chosen < biased.top[2][1]
    assert usual.chosen == usual.top[0][1]


def test_ties_go_to_the_lower_id() -> None:
    found = logprobs_of(np.asarray([1, 3, 3, 2, 3], np.float32), 0, 2)
    assert [token for token, _ in found.top] == [1, 2]
    total = np.exp(1) + 3 * np.exp(3) + np.exp(2)
    assert found.chosen == pytest.approx(1 - np.log(total))
    assert found.top[0][1] == pytest.approx(3 - np.log(total))
    assert len(logprobs_of(np.zeros(3, np.float32), 1, 9).top) == 3
