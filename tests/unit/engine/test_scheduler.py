"""Continuous batching over a model whose replies are known: what a pass computes, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from colibri.engine.engine import Engine
from colibri.engine.messages import Done, Event, Finished, Prefill, Started, Tokens
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.engine.task import Listener, Task
from colibri.errors import BusyError, NumericsError, ReadError, RequestError
from tests.unit.engine.counter import CounterModel, make_engine

MODELS: dict[str, Callable[[], CounterModel]] = {
    "blocks": lambda: CounterModel(24),
    "recurrent": lambda: CounterModel(24, num_cells=12),
}
SAMPLED = SamplingParams(temperature=1.5, seed=11, max_tokens=6)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> CounterModel:
    return MODELS[request.param]()


@dataclass
class Heard:
    """Everything that was told of one request."""

    events: list[Event] = field(default_factory=list)
    error: Exception | None = None
    task: Task | None = None

    def fail(self, error: Exception) -> None:
        assert self.error is None
        self.error = error

    def tokens(self, choice: int = 0) -> list[int]:
        found = [e for e in self.events if isinstance(e, Tokens) and e.choice == choice]
        return [token for event in found for token in event.token_ids]

    def reason(self, choice: int = 0) -> FinishReason:
        (found,) = [e for e in self.events if isinstance(e, Finished) and e.choice == choice]
        return found.reason

    @property
    def is_over(self) -> bool:
        return isinstance(self.events[-1] if self.events else None, Done)

    @property
    def reused(self) -> int:
        (started,) = [event for event in self.events if isinstance(event, Started)]
        return started.reused_tokens


def ask(engine: Engine, prompt: list[int], params: SamplingParams = SAMPLED, **more: Any) -> Heard:
    heard = Heard()
    request = GenerateRequest(prompt=tuple(prompt), params=params, **more)
    heard.task = engine.submit(request, Listener(heard.events.append, heard.fail))
    return heard


def run(engine: Engine) -> None:
    while engine.step():
        pass


def alone(prompt: list[int], params: SamplingParams = SAMPLED) -> list[int]:
    return list(make_engine(CounterModel(24)).generate(prompt, params))


def batching(model: CounterModel, **limits: Any) -> Engine:
    return make_engine(model, **{"max_sessions": 4, "prefill_chunk": 16} | limits)


PROMPTS = [[3, 1, 4], [7] * 40, list(range(90)), [5]]


def test_batched_equals_alone(model: CounterModel) -> None:
    engine = batching(model)
    heard = [ask(engine, prompt) for prompt in PROMPTS]
    run(engine)
    assert [h.tokens() for h in heard] == [alone(prompt) for prompt in PROMPTS]
    assert all(h.reason() is FinishReason.LENGTH for h in heard)
    assert max(map(len, model.batches)) == 3
    assert isinstance(heard[2].events[-1], Done)


def test_members_share_a_pass() -> None:
    model = CounterModel()
    engine = batching(model, prefill_chunk=8)
    ask(engine, [1, 2, 3])
    ask(engine, [9] * 12)
    for _ in range(3):
        engine.step()
    # The first prompt and what fits of the second; then the reply beside the rest of the second.
    assert model.batches == [[3, 5], [1, 7], [1, 1]]


def test_requests_are_admitted_in_order_of_arrival() -> None:
    model = CounterModel()
    engine = batching(model, max_sessions=2)
    heard = [ask(engine, [n], SamplingParams(max_tokens=3)) for n in range(4)]
    engine.step()
    metrics = engine.metrics()
    assert (metrics.num_running, metrics.num_waiting) == (2, 2)
    assert [bool(h.events) for h in heard] == [True, True, False, False]
    run(engine)
    assert [h.tokens() for h in heard] == [[n + 1, n + 2, n + 3] for n in range(4)]
    assert engine.metrics().num_requests == 4


def test_the_queue_is_bounded() -> None:
    engine = batching(CounterModel(), max_sessions=1, max_waiting=1)
    first, second = ask(engine, [1]), None
    engine.step()
    second = ask(engine, [2])
    with pytest.raises(BusyError, match="1 requests wait already") as error:
        ask(engine, [3])
    assert error.value.retry_after_s >= 1
    run(engine)
    assert first.reason() is second.reason() is FinishReason.LENGTH


def test_the_queue_is_bounded_before_anything_runs() -> None:
    engine = batching(CounterModel(), max_sessions=2, max_waiting=1)
    for number in range(3):
        ask(engine, [number])
    with pytest.raises(BusyError):
        ask(engine, [3])


def test_traffic_is_that_of_the_passes_taken_part_in() -> None:
    """Each pass asks for three experts, whoever is in it."""
    model = CounterModel()
    engine = batching(model)
    heard = [ask(engine, [n], SamplingParams(max_tokens=2 + 3 * n)) for n in range(2)]
    run(engine)
    late = ask(engine, [9], SamplingParams(max_tokens=1))
    run(engine)
    counts = []
    for reply in (*heard, late):
        done = reply.events[-1]
        assert isinstance(done, Done)
        counts.append(done.metrics.experts.requests)
    assert counts == [3 * 2, 3 * 5, 3]
    assert engine.metrics().experts.requests == 3 * 6


@pytest.mark.parametrize("layer", range(3))
def test_a_member_leaves_between_two_layers(model: CounterModel, layer: int) -> None:
    """The others neither notice nor start again."""
    engine = batching(model)
    stays, leaves = ask(engine, PROMPTS[0]), ask(engine, PROMPTS[2])

    def cancel(number: int, at: int) -> None:
        if (number, at) == (2, layer):
            assert leaves.task is not None
            engine.cancel(leaves.task)

    model.before_layer = cancel
    run(engine)
    assert leaves.reason() is FinishReason.CANCELLED
    assert leaves.tokens() == []
    assert isinstance(leaves.events[-1], Done)
    assert stays.tokens() == alone(PROMPTS[0])
    assert len(model.passes) <= 7  # none was computed again
    again = ask(engine, PROMPTS[2])
    run(engine)
    assert again.tokens() == alone(PROMPTS[2])


def test_cancelling_who_waits_and_who_is_done(model: CounterModel) -> None:
    engine = batching(model, max_sessions=1)
    first, waits = ask(engine, [1]), ask(engine, [2])
    assert first.task is not None
    assert waits.task is not None
    engine.step()
    engine.cancel(waits.task)
    assert waits.reason() is FinishReason.CANCELLED
    run(engine)
    engine.cancel(first.task)
    assert first.reason() is FinishReason.LENGTH
    assert len(first.events) == len(set(map(id, first.events)))
    assert sum(isinstance(event, Done) for event in first.events) == 1


@pytest.mark.parametrize("error", [NumericsError("row"), ReadError("disk")])
def test_an_error_ends_whom_it_concerns(model: CounterModel, error: Any) -> None:
    engine = batching(model)
    heard = [ask(engine, prompt) for prompt in PROMPTS[:3]]
    error.members = frozenset({1})

    def fail(number: int, layer: int) -> None:
        if (number, layer) == (4, 1):
            raise error

    model.before_layer = fail
    run(engine)
    assert heard[1].error is error
    assert not any(isinstance(event, Done) for event in heard[1].events)
    assert heard[0].tokens() == alone(PROMPTS[0])
    assert heard[2].tokens() == alone(PROMPTS[2])


def test_an_error_that_concerns_nobody_ends_the_pass_but_not_the_engine(
    model: CounterModel,
) -> None:
    engine = batching(model)
    heard = [ask(engine, prompt) for prompt in PROMPTS[:2]]

    def fail(number: int, _layer: int) -> None:
        if number == 2:
            raise OSError("disk")

    model.before_layer = fail
    engine.step()
    engine.step()
    assert [str(h.error) for h in heard] == ["disk", "disk"]
    assert (engine.metrics().num_running, len(model.free)) == (0, 24)
    after = ask(engine, PROMPTS[1])
    run(engine)
    assert after.tokens() == alone(PROMPTS[1])


def test_a_logit_that_is_not_finite_ends_one(model: CounterModel) -> None:
    engine = batching(model)
    heard = [ask(engine, prompt, SamplingParams(max_tokens=4)) for prompt in ([1], [50])]
    forward = model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        logits = forward(*args, **kwargs)
        logits[logits.argmax(axis=1) == 52] = float("nan")
        return logits

    model.forward = broken  # type: ignore[method-assign]
    run(engine)
    assert isinstance(heard[1].error, NumericsError)
    assert (heard[1].tokens(), heard[0].tokens()) == ([51], [2, 3, 4, 5])


@pytest.mark.parametrize("at_once", [2, 4])
def test_several_replies_read_the_prompt_once(model: CounterModel, at_once: int) -> None:
    engine = batching(model)
    heard = ask(engine, PROMPTS[2], n=at_once)
    run(engine)
    replies = [heard.tokens(choice) for choice in range(at_once)]
    assert replies[0] == alone(PROMPTS[2])
    assert len({tuple(reply) for reply in replies}) == at_once  # each has its own random numbers
    assert sum(model.passes) == 90 + (at_once - 1) + at_once * 5  # the others run its last token
    done = heard.events[-1]
    assert isinstance(done, Done)
    assert done.metrics.completion_tokens == 6 * at_once
    greedy = ask(engine, [1, 2], SamplingParams(max_tokens=3), n=at_once)
    run(engine)
    assert [greedy.tokens(choice) for choice in range(at_once)] == [[3, 4, 5]] * at_once


def test_one_of_several_replies_is_cancelled(model: CounterModel) -> None:
    engine = batching(model)
    heard = ask(engine, PROMPTS[1], n=3)
    assert heard.task is not None
    engine.step()  # the first reply is reading the prompt
    engine.cancel(heard.task, 0)
    for _ in range(4):
        engine.step()
    engine.cancel(heard.task, 2, FinishReason.STOP)
    run(engine)
    assert [heard.reason(choice).value for choice in range(3)] == ["cancelled", "length", "stop"]
    whole = ask(batched := batching(CounterModel(24)), PROMPTS[1], n=3)
    run(batched)
    assert heard.tokens(1) == whole.tokens(1)
    assert sum(model.passes[:3]) <= 40 + 1


def test_more_replies_than_sessions_are_refused() -> None:
    with pytest.raises(RequestError, match="n is 5, but 4 replies"):
        ask(batching(CounterModel()), [1], n=5)


def test_no_tokens_are_no_work(model: CounterModel) -> None:
    heard = ask(batching(model), [1], SamplingParams(max_tokens=0), n=2)
    assert [heard.reason(0), heard.reason(1)] == [FinishReason.LENGTH] * 2
    assert isinstance(heard.events[-1], Done)


def test_prefill_is_told(model: CounterModel) -> None:
    engine = batching(model)
    heard = ask(engine, PROMPTS[1])
    run(engine)
    told = [event.done for event in heard.events if isinstance(event, Prefill)]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0, 40)


def test_when_the_pool_is_empty_the_newest_waits() -> None:
    """Six blocks for two replies that would need eight at the end."""
    model = CounterModel(6)
    engine = batching(model, context_length=256)
    params = SamplingParams(max_tokens=150, temperature=1.0, seed=4)
    heard = [ask(engine, [n] * 100, params) for n in range(2)]
    run(engine)
    assert [h.tokens() for h in heard] == [alone_long([n] * 100, params) for n in range(2)]
    assert all(sum(batch) < 200 for batch in model.batches)


def alone_long(prompt: list[int], params: SamplingParams) -> list[int]:
    return list(make_engine(CounterModel(24), context_length=256).generate(prompt, params))
