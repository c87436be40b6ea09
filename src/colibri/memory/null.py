"""The null tier: a reader without disk, threads or time, on which decisions are tested."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from colibri.errors import ReadError
from colibri.kernels.api import FAILED, LOADING, READY
from colibri.memory.arena import Arena
from colibri.memory.jobs import Failure, Jobs, Queue, ReaderStats, Reason


class NullReader:
    """A `Reader` that lands nothing and leaves it to the caller when a job ends, and how.

    Attributes:
        demand: slots whose demand jobs are not finished, in order of submission.
        prefetch: the same for prefetch jobs.
        background: the same for those behind them.
    """

    def __init__(self, arena: Arena) -> None:
        self._states = arena.states
        self.demand: dict[int, int] = {}  # slot -> useful bytes
        self.prefetch: dict[int, int] = {}
        self.background: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        self._stats = ReaderStats()
        self._closed = False

    def submit(self, jobs: Jobs) -> None:
        """Make the slots LOADING."""
        if self._closed:
            raise ReadError("the expert store is closed: open the model again")
        new = dict(zip(jobs.slots.tolist(), jobs.nbytes.sum(axis=1).tolist(), strict=True))
        queue = self._queues[jobs.queue]
        self._states[jobs.slots] = LOADING
        queue.update(new)

    def finish(self, slot: int) -> None:
        """The slot's record has landed."""
        nbytes = self._pop(slot)
        stats = self._stats
        self._stats = replace(
            stats, records=stats.records + 1, bytes_read=stats.bytes_read + nbytes
        )
        self._states[slot] = READY

    def fail(self, slot: int, failure: Failure) -> None:
        """The slot's read has failed."""
        self._pop(slot)
        self._failures[slot] = failure
        self._stats = replace(self._stats, failed=self._stats.failed + 1)
        self._states[slot] = FAILED

    def promote(self, slots: NDArray[np.integer], queue: Queue = Queue.DEMAND) -> int:
        """Move what waits in a later queue to the end of this one."""
        moved, goal = 0, self._queues[queue]
        for slot in slots.tolist():
            for later in self._queues[queue + 1 :]:
                if slot in later:
                    goal[slot] = later.pop(slot)
                    moved += 1
        return moved

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Call off what nobody demanded."""
        waiting = np.array([slot in self._ahead for slot in slots.tolist()], bool)
        for slot in slots[waiting].tolist():
            self._pop(slot)
            self._failures[slot] = Failure(Reason.CANCELLED)
            self._states[slot] = FAILED
        return waiting

    def wait(self, slot: int) -> None:
        """Finish jobs in order until the slot is not LOADING."""
        while self._states[slot] == LOADING:
            self.finish(self._first())

    def failure(self, slot: int) -> Failure:
        """Why the slot failed."""
        return self._failures[slot]

    def stats(self) -> ReaderStats:
        """Sums since the start."""
        return self._stats

    def queues(self) -> tuple[int, int, int, int]:
        """Nothing is read before its time has come."""
        return len(self.demand), len(self.prefetch), len(self.background), 0

    def close(self) -> None:
        """Cancel everything."""
        self._closed = True
        for slot in [slot for queue in self._queues for slot in queue]:
            self.fail(slot, Failure(Reason.CANCELLED))

    def _pop(self, slot: int) -> int:
        return next(queue for queue in self._queues if slot in queue).pop(slot)

    @property
    def _queues(self) -> tuple[dict[int, int], ...]:
        return self.demand, self.prefetch, self.background

    @property
    def _ahead(self) -> set[int]:
        return self.prefetch.keys() | self.background.keys()

    def _first(self) -> int:
        return next(slot for queue in self._queues for slot in queue)


class VirtualDisk(NullReader):
    """The null tier with a clock that stands still unless somebody works or waits.

    It reads one block after another, each in the same time, those of demanded records first. A
    block that was begun is ended, whatever becomes of its record meanwhile.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self, arena: Arena, record_s: float, blocks: int = 1) -> None:
        """A record takes `record_s` seconds, in so many blocks."""
        super().__init__(arena)
        self.now = 0.0
        self._block_s, self._blocks = record_s / blocks, blocks
        self._left: dict[int, int] = {}  # blocks of records that were begun, by slot
        self._reading, self._ends = -1, 0.0

    def work(self, seconds: float) -> None:
        """Time passes in which something else is done."""
        until = self.now + seconds
        while self._reading >= 0 and self._ends <= until:
            self._end_block()
        self.now = until

    def submit(self, jobs: Jobs) -> None:
        """Begin at once if nothing is being read."""
        super().submit(jobs)
        self._begin()

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """A record whose last block is being read stays."""
        last = (slots == self._reading) & (self._left.get(self._reading) == 1)
        waiting = np.zeros(len(slots), bool)
        waiting[~last] = super().withdraw(slots[~last])
        for slot in slots[waiting].tolist():
            self._left.pop(slot, None)
            if slot == self._reading:
                self._states[slot] = LOADING  # until the block has ended
        return waiting

    def wait(self, slot: int) -> None:
        """Let time pass until the slot has landed."""
        while self._states[slot] == LOADING:
            self.now = max(self.now, self._ends)
            self._end_block()

    def _end_block(self) -> None:
        slot, ended = self._reading, self._ends
        self._reading = -1
        left = self._left.pop(slot, 0) - 1
        if left > 0:
            self._left[slot] = left
        elif left == 0:
            self.finish(slot)
        else:
            self._states[slot] = FAILED  # it was called off
        self._begin(ended)

    def _begin(self, at: float | None = None) -> None:
        if self._reading < 0 and any(self._queues):
            self._reading = self._first()
            self._left.setdefault(self._reading, self._blocks)
            self._ends = (self.now if at is None else at) + self._block_s
