"""Whatever is asked, cancelled and broken when: who is answered is answered as if alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from colibri.engine.messages import Done, Finished
from colibri.engine.request import FinishReason, SamplingParams
from colibri.errors import ReadError
from tests.examples import examples
from tests.unit.engine.counter import CounterModel, make_engine
from tests.unit.engine.test_scheduler import Heard, ask, run

BLOCKS = 7
CONTEXT = 192


class Schedules(RuleBasedStateMachine):
    """A pool of seven blocks, three sessions, prompts that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[int], SamplingParams, int, Heard]] = []
        self.broken: set[int] = set()
        self.fail_next = False

    @initialize(recurrent=st.booleans(), chunk=st.sampled_from([1, 5, 16, 64]))
    def open(self, recurrent: bool, chunk: int) -> None:
        self.model = CounterModel(BLOCKS, num_cells=9 if recurrent else 0)
        self.model.before_layer = self.before_layer
        self.engine = make_engine(
            self.model, context_length=CONTEXT, prefill_chunk=chunk, max_sessions=3
        )

    def before_layer(self, _number: int, layer: int) -> None:
        if self.fail_next and layer == 1:
            self.fail_next = False
            error = ReadError("disk")
            error.members = frozenset({0})
            raise error

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 150),
        most=st.integers(0, 40),
        n=st.integers(1, 3),
        mark=st.integers(0, 149),
    )
    def ask(self, family: int, length: int, most: int, n: int, mark: int) -> None:
        prompt = [100 * family + at % 90 for at in range(length)]
        params = SamplingParams(temperature=1.0, seed=length, max_tokens=most)
        marks = (mark,) if mark < length else ()
        heard = ask(self.engine, prompt, params, n=n, marks=marks)
        self.asked.append((prompt, params, n, heard))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        *_, n, heard = data.draw(st.sampled_from(self.asked))
        assert heard.task is not None
        choice = data.draw(st.one_of(st.none(), st.integers(0, n - 1)))
        if data.draw(st.booleans()):
            self.engine.cancel(heard.task, choice)
        else:  # in the middle of a pass
            task = heard.task
            self.engine.step(lambda: self.engine.cancel(task, choice))

    @rule()
    def fail(self) -> None:
        """The next pass fails, and it is its first member's fault."""
        self.fail_next = True

    @invariant()
    def blocks_are_not_lost(self) -> None:
        if hasattr(self, "engine") and not self.asked:
            assert len(self.model.free) == BLOCKS

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.fail_next = False
        run(self.engine)
        expected: dict[tuple[int, ...], list[int]] = {}
        for prompt, params, n, heard in self.asked:
            if heard.error is not None:
                assert isinstance(heard.error, ReadError)
                continue
            assert isinstance(heard.events[-1], Done)
            reasons = {e.choice: e.reason for e in heard.events if isinstance(e, Finished)}
            assert sorted(reasons) == list(range(n))
            key = (*prompt, -1, params.max_tokens or 0)
            if key not in expected:
                fresh = make_engine(CounterModel(BLOCKS), context_length=CONTEXT, prefill_chunk=64)
                expected[key] = list(fresh.generate(prompt, params))
            wanted, found = expected[key], heard.tokens()
            if reasons[0] is FinishReason.CANCELLED:
                assert found == wanted[: len(found)]
            else:
                assert found == wanted
        metrics = self.engine.metrics()
        assert (metrics.num_running, metrics.num_waiting) == (0, 0)
        self.engine.close()
        assert len(self.model.free) == BLOCKS
        assert self.model.kv.num_free_cells == self.model.kv.num_cells


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=examples(10), stateful_step_count=20, deadline=None)
