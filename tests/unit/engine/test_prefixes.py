"""State that requests leave behind: what begins alike is not computed again, nor different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.engine.request import SamplingParams
from colibri.errors import BudgetError
from tests.examples import examples
from tests.unit.engine.counter import CounterModel, make_engine
from tests.unit.engine.test_scheduler import SAMPLED, alone, ask, batching, run

MODELS: dict[str, Callable[[], CounterModel]] = {
    "blocks": lambda: CounterModel(12),
    "recurrent": lambda: CounterModel(12, num_cells=12),
}
PROMPT = [*range(70), 7, 7]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> CounterModel:
    return MODELS[request.param]()


def test_a_conversation_goes_on_where_it_ended(model: CounterModel) -> None:
    engine = batching(model)
    first = ask(engine, PROMPT)
    run(engine)
    model.passes.clear()
    following = [*PROMPT, *first.tokens(), 40, 41]
    second = ask(engine, following)
    run(engine)
    assert second.reused == len(PROMPT) + 5  # the last token of a reply was never run
    assert sum(model.passes) == 3 + 5
    assert second.tokens() == alone(following)


def test_the_same_prompt_again_runs_its_last_token(model: CounterModel) -> None:
    engine = batching(model)
    heard = []
    for _ in range(3):
        heard.append(ask(engine, PROMPT))
        run(engine)
    assert [h.reused for h in heard] == [0, len(PROMPT) - 1, len(PROMPT) - 1]
    assert [h.tokens() for h in heard] == [alone(PROMPT)] * 3


def test_a_common_beginning_is_shared() -> None:
    model = CounterModel(12)
    engine = batching(model)
    ask(engine, [*range(80), 1])
    run(engine)
    turned = [*range(75), 3, 3, 3]
    heard = ask(engine, turned)
    run(engine)
    assert heard.reused == 75
    assert heard.tokens() == alone(turned)
    assert len(model.free) == 12 - 3  # a whole block is shared, each has one of its own
    again = ask(engine, [*range(80), 1])
    run(engine)
    assert again.reused == 80


def test_a_marked_place_is_remembered() -> None:
    model = MODELS["recurrent"]()
    engine = batching(model)
    ask(engine, [*range(40), 1, 2, 3], marks=(40,))
    run(engine)
    other = [*range(40), 9, 9]
    heard = ask(engine, other)
    run(engine)
    assert heard.reused == 40
    assert heard.tokens() == alone(other)


def test_a_marked_place_outlasts_the_turns_of_a_conversation() -> None:
    model = CounterModel(12, num_cells=3)
    engine = batching(model, max_sessions=1)
    said = [*range(40), 1, 2, 3]
    for turn in range(3):
        heard = ask(engine, said, marks=(40,))
        run(engine)
        assert heard.tokens() == alone(said)
        said = [*said, *heard.tokens(), 50 + turn, 60]
    other = ask(engine, [*range(40), 9, 9], marks=(40,))
    run(engine)
    assert other.reused == 40
    assert other.tokens() == alone([*range(40), 9, 9])


def test_running_requests_lend_too(model: CounterModel) -> None:
    engine = batching(model)
    first = ask(engine, PROMPT, SamplingParams(max_tokens=20))
    for _ in range(8):
        engine.step()
    second = ask(engine, PROMPT)
    run(engine)
    assert second.reused == len(PROMPT) - 1
    assert second.tokens() == alone(PROMPT)
    assert len(first.tokens()) == 20


def test_the_least_recently_used_makes_room() -> None:
    model = CounterModel(4)
    engine = batching(model)
    for start in (100, 200, 300, 100):
        ask(engine, [start + n for n in range(60)], SamplingParams(max_tokens=2))
        run(engine)
    assert engine.metrics().num_prefixes == 4  # two of them share a block
    ask(engine, [400 + n for n in range(70)], SamplingParams(max_tokens=2))
    run(engine)
    again = {
        start: ask(engine, [start + n for n in range(60)], SamplingParams(max_tokens=2))
        for start in (100,)
    }
    run(engine)
    assert again[100].reused == 59


def test_what_is_not_shared_leaves_nothing() -> None:
    model = CounterModel(12)
    engine = make_engine(model)
    tokens = list(engine.generate(PROMPT, SAMPLED))
    assert (len(model.free), engine.metrics().num_prefixes) == (12, 0)
    assert tokens == alone(PROMPT)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), min_size=1, max_size=6))
@settings(max_examples=examples(25))
def test_whatever_was_asked_before_changes_nothing(asked: list[tuple[int, int]]) -> None:
    """Prompts of three beginnings and any length, in a pool that holds few of them."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=3)
    for kind in MODELS.values():
        engine = batching(kind(), max_sessions=2)
        heard = []
        for family, length in asked:
            prompt = [family * 100 + n for n in range(length)]
            heard.append((prompt, ask(engine, prompt, params)))
            engine.step()
        run(engine)
        for prompt, reply in heard:
            assert reply.tokens() == alone(prompt, params)


def test_sessions_that_callers_hold_share_cells() -> None:
    """Snapshots make room for the state of another session, and cost no token."""
    engine = make_engine(CounterModel(12, num_cells=3))
    sessions = [engine.open_session() for _ in range(3)]
    prompts = [[start + n for n in range(10)] for start in (100, 200, 300)]
    for _ in range(2):
        for session, prompt in zip(sessions, prompts, strict=True):
            reply = engine.generate(prompt, SamplingParams(max_tokens=3), session=session)
            assert list(reply) == [prompt[-1] + n for n in (1, 2, 3)]
    with pytest.raises(BudgetError, match="all 3 cells"):
        list(engine.generate([1, 2], SamplingParams(max_tokens=3), session=engine.open_session()))
