"""Continuous batching: which tokens of which requests one pass computes together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.engine.archive import Archive, Arrival
from colibri.engine.forecast import PassForecast
from colibri.engine.forward import ForwardModel, StatePool
from colibri.engine.limits import EngineLimits
from colibri.engine.messages import Done
from colibri.engine.metrics import ExpertCounts
from colibri.engine.passes import Part, run_pass
from colibri.engine.prefixes import Prefixes
from colibri.engine.request import FinishReason
from colibri.engine.session import Session
from colibri.engine.task import Choice, Task
from colibri.errors import BusyError, Cancelled

Ids: TypeAlias = NDArray[np.int32]
LEAST_CHUNK = 8  # prompt tokens of a pass, however long it takes
_ARRIVAL_S = 0.05  # after which messages are looked at although a read is pending


class Scheduler:
    """Runs tasks pass by pass; all calls come from one thread, or take turns.

    Args:
        model: the model.
        pool: where attention state is borrowed.
        limits: how much is computed together.
        counts: expert traffic since the start.
        booked: called with each task that is over.
        clock: seconds.
        archive: keeps prefixes on disk too, if given.
        opened: sessions that callers hold.

    Attributes:
        poll: called before each pass and between layers; it may call `cancel`.
        prefixes: what requests that are over left behind.
    """

    def __init__(
        self,
        model: ForwardModel,
        pool: StatePool,
        limits: EngineLimits,
        counts: Callable[[], ExpertCounts],
        booked: Callable[[Task], None] = lambda _task: None,
        clock: Callable[[], float] = perf_counter,
        archive: Archive | None = None,
        opened: Collection[Session] = (),
    ) -> None:
        self.limits, self.poll, self._opened = limits, _nothing, opened
        self._model, self._pool, self._counts = model, pool, counts
        self._booked, self._clock = booked, clock
        self._counted = counts()
        self._sharing: set[Task] = set()  # whose traffic is counted since then
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []  # in order of admission
        self._arriving: dict[Choice, Arrival] = {}  # whose state is being read from the disk
        self._in_pass: list[Choice] = []
        self._leaving: list[Choice] = []  # of the pass, since the model asked last
        self._forecast = PassForecast()
        self._usual_s = 1.0  # what a request takes, waiting included
        self.prefixes = Prefixes(self._open_session, archive)

    @property
    def sessions(self) -> list[Session]:
        """Of the replies that are being computed."""
        own = (*self._running, *self._arriving)
        return [c.session for c in own if c.session is not None]

    @property
    def num_running(self) -> int:
        """Replies that are being computed, or whose state is being read."""
        return len(self._running) + len(self._arriving)

    @property
    def num_waiting(self) -> int:
        """Requests whose turn has not come."""
        return sum(not choice.task.was_started for choice in self._waiting)

    @property
    def tasks(self) -> list[Task]:
        """All that are not over."""
        every = (*self._running, *self._arriving, *self._waiting)
        return list(dict.fromkeys(c.task for c in every))

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            BusyError: too many wait already.
        """
        waiting, limits = self.num_waiting, self.limits
        free = limits.max_sessions - self._num_taken()
        if waiting >= limits.max_waiting + max(0, free):
            raise BusyError(
                f"{waiting} requests wait already, as many as may: ask again later",
                max(1.0, self._usual_s * waiting / limits.max_sessions),
            )
        if task.max_tokens:
            self._waiting.append(task.pending.popleft())
            return
        for choice in task.choices:
            choice.finish(FinishReason.LENGTH)
        self._conclude(task)

    def cancel(
        self,
        task: Task,
        choice: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """End a reply of a task, or all; what has ended stays as it is. Allowed in `poll`."""
        for each in task.unfinished:
            if choice is None or each.index == choice:
                each.finish(reason)
                if each in self._in_pass:
                    self._leaving.append(each)
                else:
                    self._retire(each)
        self._conclude(task)

    def step(self) -> bool:
        """Admit what may be, then run one pass; False where there is nothing to do."""
        self.poll()
        self._land()
        self._admit()
        parts = self._with_room(self._compose())
        if parts:
            self._run(parts)
        elif self._arriving:
            self.prefixes.wait_for_any(tuple(self._arriving.values()), _ARRIVAL_S)
        return bool(parts or self._waiting or self._arriving)

    def _open_session(self) -> Session:
        return Session(self._model, self._pool.open_state())

    def _admit(self) -> None:
        """In order of arrival; who does not fit makes the others wait."""
        while self._waiting:
            choice = self._waiting[0]
            if not self._has_place(choice.task):
                return
            self._open(choice)
            if self._running and not self._has_room(choice):
                self._put_back(choice)
                return
            self._waiting.popleft()
            if choice not in self._arriving:
                self._begin(choice)

    def _begin(self, choice: Choice) -> None:
        self._running.append(choice)
        if not choice.task.was_started:
            choice.task.start(choice.position)

    def _land(self) -> None:
        """Go on with those whose state has been read; where a file was broken, try others."""
        for choice, arrival in [*self._arriving.items()]:
            if arrival.is_over:
                del self._arriving[choice]
                if self.prefixes.landed(arrival):
                    self._begin(choice)
                else:
                    self._put_back(choice)

    def _put_back(self, choice: Choice) -> None:
        """It waits again, before all others."""
        self._release(choice)
        self._waiting.appendleft(choice)

    def _has_place(self, task: Task) -> bool:
        """All replies to a prompt get a place when the first does."""
        wanted = self._num_taken() + len(task.unfinished)
        return task.was_started or wanted <= self.limits.max_sessions

    def _num_taken(self) -> int:
        """Places of replies whose request was started, or is about to be."""
        arriving = {choice.task for choice in self._arriving}
        taken = (t for t in self.tasks if t.was_started or t in arriving)
        return sum(len(task.unfinished) for task in taken)

    def _has_room(self, choice: Choice) -> bool:
        """Whether it fits beside all that is running, as long as each is now."""
        return self._make_room([(c, c.length + 1) for c in [*self._running, choice]])

    def _open(self, choice: Choice) -> None:
        """Give it the state that it begins with, or begin to read that from the disk."""
        task, ids = choice.task, choice.ids()
        mine = [c.session for c in task.choices if c.session is not None]
        donors = self.sessions if task.shared else mine
        if task.session is not None:
            choice.session = task.session
            held = task.session.rewind_to_prefix_of(ids.tolist())
        else:
            held = self.prefixes.longest(ids, donors, idle=task.shared)
        own = task.session is not None or task.shared
        arrival = self.prefixes.fetch(ids, held, task.session) if own else None
        if arrival is not None:
            self._arriving[choice], choice.session = arrival, arrival.session
        elif choice.session is None:
            choice.session = self.prefixes.borrow(ids, donors, idle=task.shared)

    def _make_room(self, lengths: Sequence[tuple[Choice, int]]) -> bool:
        return self.make_room([(c.session, n) for c, n in lengths if c.session is not None])

    def make_room(self, lengths: Sequence[tuple[Session, int]]) -> bool:
        """Free blocks and cells for sessions of such lengths, at the cost of idle prefixes.

        Cells at the cost of snapshots too, which only save others from computing again.
        """
        missing = [session.state.missing(length) for session, length in lengths]
        blocks, cells = sum(found[0] for found in missing), sum(found[1] for found in missing)
        while blocks > self._pool.num_free or cells > self._pool.num_free_cells:
            short = cells > self._pool.num_free_cells
            if not self.prefixes.evict() and not (short and self._forget_snapshot()):
                return False
        return True

    def _forget_snapshot(self) -> bool:
        sessions = (*self._opened, *self.sessions)
        return any(session.forget_snapshot() for session in sessions)

    def _compose(self) -> list[tuple[Choice, Ids, Ids]]:
        """What the next pass computes: choice, its ids, the rows that logits are wanted of.

        Each reply that is being decoded goes on; prompts share the rest, in order of admission.
        """
        decoding = [c for c in self._running if c.is_decoding]
        filling = [c for c in self._running if not c.is_decoding]
        rows = self.limits.prefill_chunk + self.limits.max_sessions - 1
        parts = []
        for left, choice in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):
            choice.remember()
            parts.append((choice, *choice.next_ids(rows - left)))
            rows -= len(parts[-1][1])
        taken = sum(len(ids) for _, ids, _ in parts)
        room = min(rows, self.limits.prefill_chunk)
        if taken and filling:
            room = self._chunk(taken, room)
        for choice in filling:
            if room:
                choice.remember()
                parts.append((choice, *choice.next_ids(room)))
                room -= len(parts[-1][1])
        return parts

    def _chunk(self, taken: int, most: int) -> int:
        """Prompt tokens beside `taken` rows of replies, so that these go on in time."""
        least = min(LEAST_CHUNK, most)
        wanted = self.limits.max_stall_s
        return self._forecast.rows_within(wanted, taken + least, taken + most) - taken

    def _with_room(self, parts: list[tuple[Choice, Ids, Ids]]) -> list[tuple[Choice, Ids, Ids]]:
        """The parts for which there are blocks and cells; where there are none the newest waits."""
        while not self._make_room([(c, c.position + len(ids)) for c, ids, _ in parts]):
            if len(self._running) + len(self._arriving) == 1:
                break
            newest = next(reversed(self._arriving), self._running[-1])
            self._put_back(newest)
            parts = [part for part in parts if part[0] is not newest]
        return parts

    def _run(self, parts: Sequence[tuple[Choice, Ids, Ids]]) -> None:
        members = self._in_pass = [choice for choice, _, _ in parts]
        tasks = {choice.task for choice in members}
        if tasks != self._sharing:
            self.settle(tasks)
        start = self._clock()
        whole = [Part(c.session, ids, wanted) for c, ids, wanted in parts if c.session is not None]
        try:
            found = run_pass(self._model, whole, leaving=self._departures)
        except Cancelled:
            found = [None] * len(parts)
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._in_pass, self._leaving = [], []
            for choice in members:
                if choice.reason is not None:
                    self._retire(choice)
        seconds = self._clock() - start
        if all(logits is not None for logits in found):
            self._forecast.observe(sum(len(part.ids) for part in whole), seconds)
        for task in tasks:
            task.spend(seconds)
        for choice, logits in zip(members, found, strict=True):
            if logits is not None and choice.reason is None:
                self._advance(choice, logits)

    def _departures(self) -> Sequence[int]:
        self.poll()
        left = [self._in_pass.index(choice) for choice in self._leaving]
        self._leaving.clear()
        return left

    def settle(self, sharing: set[Task] | None = None) -> None:
        """Put the traffic since the last time on the account of all that shared the passes.

        From now on it is that of `sharing`, by default the same ones.
        """
        now = self._counts()
        traffic, self._counted = now - self._counted, now
        for task in self._sharing:
            task.spent.experts += traffic
        if sharing is not None:
            self._sharing = sharing
        self._sharing = {task for task in self._sharing if not task.is_over}

    def _advance(self, choice: Choice, logits: NDArray[np.float32]) -> None:
        task, start = choice.task, self._clock()
        if not task.has_begun:
            task.tell_prefill(choice.position)
        if not len(logits):
            return
        try:
            choice.take(logits)
        except Exception as error:
            self._end(task, error)
            return
        now = self._clock()
        task.spend(now - start)
        task.has_begun = True
        task.spent.ttft_s = task.spent.ttft_s or now - task.spent.requested
        self._waiting.extendleft(reversed(task.release()))
        if choice.reason is not None:
            self._retire(choice)
            self._conclude(task)

    def _release(self, choice: Choice) -> None:
        """It is computed no more; its state is for others, where it shares."""
        if choice in self._running:
            self._running.remove(choice)
        if choice in self._waiting:
            self._waiting.remove(choice)
        arrival = self._arriving.pop(choice, None)
        if arrival is not None:
            arrival.abandon()
        self._give_back(choice)

    def _give_back(self, choice: Choice) -> None:
        session, choice.session = choice.session, None
        if session is None:
            return
        if session is choice.task.session:
            self.prefixes.write_down(session)
        elif choice.task.shared and not session.is_closed:
            self.prefixes.keep(session)
        else:
            session.close()

    def _retire(self, choice: Choice) -> None:
        """A reply has ended. If it was reading the prompt, another takes its place."""
        self._release(choice)
        task = choice.task
        if task.pending and not task.has_begun and choice is task.reader:
            self._waiting.extendleft(task.release(1))

    def _conclude(self, task: Task) -> None:
        if not task.unfinished and not task.is_over:
            task.is_over = True
            self.settle()
            self._usual_s += 0.2 * (self._clock() - task.spent.requested - self._usual_s)
            self._booked(task)
            task.listener.tell(Done(id=task.id, metrics=task.metrics))

    def _fail(self, error: Exception) -> None:
        """A pass failed: end those that it concerns. The others go on from where they were."""
        concerned = getattr(error, "members", None)
        for index, choice in enumerate(list(self._in_pass)):
            if concerned is None or index in concerned:
                self._end(choice.task, error)

    def _end(self, task: Task, error: Exception) -> None:
        """A task ends with an error; nothing of its state is kept."""
        if task.is_over:
            return
        task.is_over, task.shared = True, False
        self.settle()
        task.pending.clear()
        for choice in task.unfinished:
            choice.reason = FinishReason.CANCELLED
            self._release(choice)
        self._booked(task)
        task.listener.fail(error)


def _nothing() -> None:
    """Nobody has anything to say between two layers."""
