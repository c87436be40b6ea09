"""A reader whose reads are written down: each from its submission to its landing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.kernels.api import LOADING
from colibri.memory.arena import Arena
from colibri.memory.jobs import Failure, Jobs, Queue, Reader, ReaderStats, Reason, TimedReader
from colibri.spans import Spans

_OUTCOMES = {0: "landed", **{int(reason): reason.name.lower() for reason in Reason}}


@dataclass(frozen=True, slots=True)
class _Asked:
    record: int
    nbytes: int
    queue: str  # that it was submitted to


class TracedReader:
    """A `Reader`; what a slot's job took is asked for when the slot gets its next one."""

    def __init__(self, reader: TimedReader, arena: Arena, index: ExpertIndex, spans: Spans) -> None:
        self._reader, self._states, self._spans = reader, arena.states, spans
        self._layers = [layout.layer for layout in index.layers]
        self._num_experts = index.file.shape[1]
        self._asked: dict[int, _Asked] = {}

    def submit(self, jobs: Jobs) -> None:
        """See `Reader.submit`."""
        queue = jobs.queue.name.lower()
        with self._spans.span("submit", records=len(jobs.slots), queue=queue):
            slots = jobs.slots.tolist()
            self._tell(slots)
            self._reader.submit(jobs)
            sizes = jobs.nbytes.sum(axis=1).tolist()
            for slot, record, nbytes in zip(slots, jobs.records.tolist(), sizes, strict=True):
                self._asked[slot] = _Asked(record, nbytes, queue)

    def promote(self, slots: NDArray[np.integer], queue: Queue = Queue.DEMAND) -> int:
        """See `Reader.promote`."""
        return self._reader.promote(slots, queue)

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """See `Reader.withdraw`."""
        with self._spans.span("withdraw", records=len(slots)):
            return self._reader.withdraw(slots)

    def wait(self, slot: int) -> None:
        """See `Reader.wait`."""
        with self._spans.span("wait", "wait"):
            self._reader.wait(slot)

    def failure(self, slot: int) -> Failure:
        """See `Reader.failure`."""
        return self._reader.failure(slot)

    def stats(self) -> ReaderStats:
        """See `Reader.stats`."""
        return self._reader.stats()

    def queues(self) -> tuple[int, int, int, int]:
        """See `Reader.queues`."""
        return self._reader.queues()

    def close(self) -> None:
        """Call off what waits, and tell of all that was read; see `Reader.close`."""
        open_slots = np.array(list(self._asked), np.int64)
        loading = open_slots[self._states[open_slots] == LOADING]
        self._reader.withdraw(loading)
        for slot in loading.tolist():
            self._reader.wait(slot)
        self._tell(list(self._asked))
        self._reader.close()

    def _tell(self, slots: list[int]) -> None:
        """What became of the last jobs of `slots`, none of which is LOADING."""
        for slot in slots:
            asked = self._asked.pop(slot, None)
            if asked is None:
                continue
            (submitted, begun, ended), reason = self._reader.times(slot)
            row, expert = divmod(asked.record, self._num_experts)
            layer = self._layers[row]
            self._spans.read(
                f"layer {layer} expert {expert}",
                submitted,
                ended,
                layer=layer,
                expert=expert,
                bytes=asked.nbytes,
                queue=asked.queue,
                waited_us=round((begun - submitted) / 1000, 3) if begun else None,
                outcome=_OUTCOMES[reason],
            )


def traced_reader(reader: TimedReader, arena: Arena, index: ExpertIndex, spans: Spans) -> Reader:
    """The same reader, with its reads written down."""
    return TracedReader(reader, arena, index, spans)
