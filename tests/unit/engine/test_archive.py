"""Conversations on disk: a later engine goes on with them as if it had never ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colibri.engine.archive import Archive, Arrival
from colibri.engine.engine import Engine
from colibri.engine.request import SamplingParams
from colibri.kv import StoredStates
from tests.unit.engine.counter import CounterModel, make_engine
from tests.unit.engine.test_scheduler import SAMPLED, alone, ask, batching, run

MODELS: dict[str, Callable[[], CounterModel]] = {
    "blocks": lambda: CounterModel(12),
    "recurrent": lambda: CounterModel(12, num_cells=12),
}
PROMPT = [*range(100), 7, 7]


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> Callable[[], CounterModel]:
    return MODELS[request.param]


class Runs:
    """Engines one after the other over one directory."""

    def __init__(self, directory: Path, kind: Callable[[], CounterModel]) -> None:
        self.directory, self.kind = directory, kind
        self.notes: list[str] = []

    def engine(self, **limits: Any) -> Engine:
        self.model = self.kind()
        states = StoredStates(self.directory, self.model.kv.num_cells > 0, 1 << 30)
        return batching(self.model, archive=Archive(states, self.notes.append), **limits)


def kept(runs: Runs) -> None:
    """A run that leaves `PROMPT` on disk."""
    engine = runs.engine()
    ask(engine, PROMPT)
    run(engine)
    engine.close()


@pytest.fixture
def runs(tmp_path: Path, kind: Callable[[], CounterModel]) -> Runs:
    return Runs(tmp_path, kind)


def test_a_conversation_survives_a_restart(runs: Runs) -> None:
    engine = runs.engine()
    first = ask(engine, PROMPT)
    run(engine)
    engine.close()
    engine = runs.engine()
    following = [*PROMPT, *first.tokens(), 40, 41]
    second = ask(engine, following)
    run(engine)
    assert second.reused == len(PROMPT) + 5
    assert sum(runs.model.passes) == 3 + 5
    assert second.tokens() == alone(following)
    assert runs.notes == []


def test_the_same_prompt_again(runs: Runs) -> None:
    for reused in (0, len(PROMPT) - 1):
        engine = runs.engine()
        heard = ask(engine, PROMPT)
        run(engine)
        engine.close()
        assert (heard.reused, heard.tokens()) == (reused, alone(PROMPT))


def test_what_made_room_is_read_back(runs: Runs) -> None:
    engine = runs.engine()
    for start in (0, 100, 200, 300, 0):
        prompt = [start + n for n in range(120)]
        heard = ask(engine, prompt)
        run(engine)
        assert heard.tokens() == alone(prompt)
    assert heard.reused == 119
    assert len(runs.model.free) < 12
    engine.close()
    assert len(runs.model.free) == 12


def test_a_session_of_the_callers_own_is_read_back(runs: Runs) -> None:
    engine = runs.engine()
    with engine.open_session() as session:
        first = list(engine.generate(PROMPT, SAMPLED, session=session))
        longer = [*PROMPT, *first, 1]
        second = list(engine.generate(longer, SAMPLED, session=session))
    engine.close()
    engine = runs.engine()
    with engine.open_session() as session:
        again = engine.generate(longer, SAMPLED, session=session)
        assert list(again) == second
        assert again.reused_tokens == len(longer) - 1
        other = [5, 6, 7]
        assert list(engine.generate(other, SAMPLED, session=session)) == alone(other)
    plain = engine.generate(longer, SAMPLED)
    assert list(plain) == second
    assert plain.reused_tokens == len(longer) - 1
    engine.close()


def test_a_broken_file_costs_a_prefill_and_is_told(runs: Runs) -> None:
    engine = runs.engine()
    ask(engine, PROMPT)
    run(engine)
    engine.close()
    (block,) = runs.directory.glob("*.block")
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    engine = runs.engine()
    heard = ask(engine, PROMPT)
    run(engine)
    engine.close()
    assert (heard.reused, heard.tokens()) == (0, alone(PROMPT))
    assert len(runs.notes) == 1
    assert block.name in runs.notes[0]
    assert block.exists()  # written anew


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is read before it is set."""
    opened, fill = threading.Event(), Archive._fill

    def slow(archive: Archive, arrival: Arrival) -> None:
        assert opened.wait(20)
        fill(archive, arrival)

    monkeypatch.setattr(Archive, "_fill", slow)
    return opened


def test_others_go_on_while_state_is_read(runs: Runs, opened: threading.Event) -> None:
    kept(runs)
    engine = runs.engine()
    other = ask(engine, [5, 6, 7], SamplingParams(max_tokens=30))
    engine.step()
    resumed = ask(engine, PROMPT)
    third = ask(engine, [8, 9])  # it came later, and need not wait either
    while not (other.is_over and third.is_over):
        engine.step()
    assert (resumed.events, engine.metrics().num_running) == ([], 1)
    opened.set()
    run(engine)
    assert (resumed.reused, resumed.tokens()) == (len(PROMPT) - 1, alone(PROMPT))
    assert third.tokens() == alone([8, 9])
    engine.close()
    assert len(runs.model.free) == 12


def test_state_that_nobody_wants_any_more_is_not_read(runs: Runs, opened: threading.Event) -> None:
    kept(runs)
    engine = runs.engine()
    left = ask(engine, PROMPT)
    engine.step()
    assert left.task is not None
    engine.cancel(left.task)
    assert (engine.metrics().num_running, len(runs.model.free)) == (0, 12)
    again = ask(engine, PROMPT)
    opened.set()
    run(engine)
    assert (again.reused, again.tokens()) == (len(PROMPT) - 1, alone(PROMPT))
    engine.close()


def test_state_on_its_way_makes_room_for_replies(runs: Runs, opened: threading.Event) -> None:
    kept(runs)
    cells = runs.model.kv.num_cells
    runs.kind = lambda: CounterModel(5, num_cells=cells)
    engine = runs.engine()
    longer = [ask(engine, [n], SamplingParams(max_tokens=100)) for n in (5, 6)]
    engine.step()
    resumed = ask(engine, PROMPT)
    engine.step()
    while not all(heard.is_over for heard in longer):
        engine.step()
    opened.set()
    run(engine)
    assert [len(heard.tokens()) for heard in longer] == [100, 100]
    assert resumed.tokens() == alone(PROMPT)
    engine.close()


def test_a_full_disk_is_told_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(StoredStates, "write", full)
    engine = runs.engine()
    for _ in range(2):
        heard = ask(engine, PROMPT)
        run(engine)
        assert heard.tokens() == alone(PROMPT)
    engine.close()
    assert len(runs.notes) == 1
    assert "No space left" in runs.notes[0]
    assert engine.metrics().num_unsaved == 0


def test_nothing_is_written_without_a_directory(tmp_path: Path) -> None:
    engine = make_engine(CounterModel())
    list(engine.generate(PROMPT, SAMPLED))
    engine.close()
    assert list(tmp_path.iterdir()) == []
