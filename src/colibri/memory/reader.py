"""Reading records on Python threads: same jobs and answers as native/reader.c, but slower."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from colibri.errors import ReadError
from colibri.kernels.api import FAILED, LOADING, READY
from colibri.memory.arena import Arena
from colibri.memory.drives import Drives
from colibri.memory.forked import LIVING
from colibri.memory.jobs import Failure, Jobs, Queue, ReaderStats, Reason
from colibri.memory.landing import Job, Landing, LandingFailed, split

_WAIT_S = 0.1  # so that Ctrl-C gets through where waiting on a condition cannot be interrupted


class ThreadReader:
    """A `Reader` whose threads need the GIL between reads, and lag where Python is busy."""

    def __init__(self, arena: Arena, drives: Drives, num_threads: int = 4) -> None:
        """Start the threads; `drives` belongs to the reader from now on."""
        self._states, self._drives = arena.states, drives
        self._landing = Landing(arena, drives)
        self._changed = threading.Condition()
        self._queues: dict[Queue, deque[Job]] = {queue: deque() for queue in Queue}
        self._failures: dict[int, Failure] = {}
        self._times: dict[int, list[int]] = {}
        self._reading = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"colibri-reader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        LIVING.add(self)

    def submit(self, jobs: Jobs) -> None:
        """Queue the jobs; see `Reader.submit`."""
        new = split(jobs, self._drives)
        with self._changed:
            if self._closed:
                raise ReadError("the expert store is closed: open the model again")
            try:
                now = time.monotonic_ns()
                for job in new:
                    self._failures.pop(job.slot, None)
                    self._times[job.slot] = [now, 0, 0]
                self._states[jobs.slots] = LOADING
                self._queues[jobs.queue].extend(new)
                self._changed.notify_all()
            except BaseException:  # Ctrl-C: no slot may stay LOADING without a job
                self._withdraw({job.slot for job in new})
                raise

    def promote(self, slots: NDArray[np.integer], queue: Queue = Queue.DEMAND) -> int:
        """Move what waits in a later queue; see `Reader.promote`."""
        wanted = set(slots.tolist())
        with self._changed:
            moved = [
                (later, job)
                for later in Queue
                if later > queue
                for job in self._queues[later]
                if job.slot in wanted
            ]
            for later, job in moved:
                self._queues[later].remove(job)
                self._queues[queue].append(job)
        return len(moved)

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Call off what nobody demanded and nobody has begun."""
        asked = set(slots.tolist())
        with self._changed:
            ahead = (*self._queues[Queue.PREFETCH], *self._queues[Queue.BACKGROUND])
            waiting = {job.slot for job in ahead} & asked
            self._withdraw(waiting)
            self._changed.notify_all()
        return np.isin(slots, list(waiting))

    def wait(self, slot: int) -> None:
        """Sleep until the slot has landed or failed."""
        with self._changed:
            while self._states[slot] == LOADING:
                self._changed.wait(_WAIT_S)

    def failure(self, slot: int) -> Failure:
        """Why the slot failed."""
        return self._failures.get(slot, Failure(Reason.CANCELLED))

    def times(self, slot: int) -> tuple[tuple[int, int, int], int]:
        """See `TimedReader.times`."""
        with self._changed:
            submitted, begun, ended = self._times[slot]
            failure = self._failures.get(slot)
        return (submitted, begun, ended), 0 if failure is None else int(failure.reason)

    def queues(self) -> tuple[int, int, int, int]:
        """See `Reader.queues`."""
        with self._changed:
            demanded, predicted, background = map(len, self._queues.values())
            return demanded, predicted, background, self._reading

    def stats(self) -> ReaderStats:
        """Sums since the start."""
        return self._landing.stats

    def close(self) -> None:
        """Cancel what waits, finish what is being read."""
        LIVING.discard(self)
        with self._changed:
            self._closed = True
            self._withdraw({job.slot for queue in self._queues.values() for job in queue})
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._drives.close()

    def abandon(self) -> None:
        """In a forked child; see `Abandonable`. The old lock may be held for ever."""
        self._changed = threading.Condition()
        self._closed, self._threads = True, []
        self._states[self._states == LOADING] = FAILED

    def _withdraw(self, slots: set[int]) -> None:
        """Cancel those of the slots whose jobs nobody has begun; the lock is held."""
        for queue in self._queues.values():
            for job in [job for job in queue if job.slot in slots]:
                queue.remove(job)
        for slot in slots:
            self._failures[slot] = Failure(Reason.CANCELLED)
            self._times[slot][2] = time.monotonic_ns()
            self._states[slot] = FAILED

    def _work(self) -> None:
        while (job := self._take()) is not None:
            state = READY
            try:
                self._landing.land(job)
            except LandingFailed as failed:
                self._failures[job.slot] = failed.failure
                state = FAILED
            with self._changed:
                self._reading -= 1
                self._times[job.slot][2] = time.monotonic_ns()
                self._states[job.slot] = state
                self._changed.notify_all()

    def _take(self) -> Job | None:
        with self._changed:
            while not self._closed:
                for queue in self._queues.values():
                    if queue:
                        job = queue.popleft()
                        self._times[job.slot][1] = time.monotonic_ns()
                        self._reading += 1
                        return job
                self._changed.wait()
        return None
