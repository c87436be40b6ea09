"""Measures how a drive is best read, on the model's own records and through the reader itself.

Everything together reads at most 256 MB and takes about two seconds at most. Each reading is of
other records, which are dropped from the page cache before, so that no arm profits from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import ReadError
from colibri.kernels.api import EMPTY, READY
from colibri.memory.arena import Arena
from colibri.memory.devices import Reading
from colibri.memory.drives import Drives
from colibri.memory.jobs import PAGE, Queue, Reader, steps_of
from colibri.memory.mirror import record_pieces
from colibri.memory.record_table import RecordTable
from colibri.memory.slot_classes import slot_classes
from colibri.memory.system import drop_cached

MOST_BYTES, MOST_S = 256 << 20, 1.6
LEAST_MODEL = 64 << 20  # bytes of all experts; with less there is nothing to measure
_ARM = 28 << 20  # bytes of one reading
_MOST_TOUCHED = 64 << 20  # bytes of slots that take part
_BETTER = 1.15  # what is not the default must be so much faster: drives are noisy

MakeReader = Callable[[Drives, int, int], Reader]  # drives, threads, block


class Measurement:
    """Arms of one measurement; knows what it may still spend."""

    def __init__(
        self,
        index: ExpertIndex,
        arena: Arena,
        make_reader: MakeReader,
        records: NDArray[np.integer],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`records` are those that the drive holds; `index` names its files."""
        self._index, self._arena = index, arena
        self._make_reader, self._clock = make_reader, clock
        self._table = RecordTable(index)
        self._row = int(np.argmax(np.bincount(records // index.file.shape[1], minlength=1)))
        self._slots = _room(index, arena, self._row)
        own = records[records // index.file.shape[1] == self._row]
        self._records = np.random.default_rng(0).permutation(own)
        self._next = 0
        self.spent_bytes = 0
        self._began = clock()

    @property
    def exhausted(self) -> bool:
        """Whether another arm would be too much."""
        most = self.spent_bytes + max(_ARM, self._record_nbytes) > MOST_BYTES
        return most or self._clock() - self._began > MOST_S

    @property
    def _record_nbytes(self) -> int:
        return self._index.layers[self._row].record_nbytes

    def find(self, start: Reading) -> Reading:
        """The best way, starting from `start`; raises ReadError."""
        if not len(self._records) or not len(self._slots):
            return start
        best = self._timed(start)
        direct = best
        if start.direct:
            best = self._better(best, replace(start, direct=False))
        if not best.direct:
            again = self._timed(replace(best, keep_cache=True), again=True)
            best = replace(best, keep_cache=again.bytes_per_s > _BETTER * direct.bytes_per_s)
        for threads in (8, 2, 1):
            best = self._better(best, replace(best, threads=threads))
        for block in (4 << 20, 16 << 20):
            if (
                block * best.threads <= self._record_nbytes
            ):  # a single record keeps all threads busy
                best = self._better(best, replace(best, block=block))
        return best

    def _better(self, best: Reading, other: Reading) -> Reading:
        if self.exhausted:
            return best
        found = self._timed(other)
        if found.bytes_per_s <= _BETTER * best.bytes_per_s or self.exhausted:
            return best
        # Drives are noisy: it has to win twice, against what the best gives by now.
        before, again = self._timed(best), self._timed(other)
        return again if again.bytes_per_s > _BETTER * before.bytes_per_s else best

    def _timed(self, reading: Reading, again: bool = False) -> Reading:
        """Read some records that way; `again` takes those of the last time."""
        n = min(len(self._slots), max(1, _ARM // self._record_nbytes), len(self._records))
        if again:
            self._next -= n
        chosen = self._records.take(range(self._next, self._next + n), mode="wrap")
        self._next += n
        drives = Drives(self._index, direct=[reading.direct], keep_cache=reading.keep_cache)
        if not again:
            self._forget(drives, chosen)
        reader = self._make_reader(drives, reading.threads, reading.block)
        try:
            seconds = self._read(reader, chosen)
        finally:
            reader.close()
            self._arena.states[self._slots] = EMPTY
        nbytes = n * self._record_nbytes
        self.spent_bytes += nbytes
        return replace(reading, bytes_per_s=round(nbytes / max(seconds, 1e-9)))

    def _read(self, reader: Reader, records: NDArray[np.integer]) -> float:
        slots = self._slots[: len(records)]
        experts = np.asarray(records - self._row * self._index.file.shape[1], np.int64)
        jobs = self._table.jobs(self._row, experts, slots, self._arena.bases, Queue.DEMAND)
        # The drive is measured, not the checks.
        jobs = replace(
            jobs, crcs=None, scans=np.empty((0, 6), np.int64), packings=(), steps=steps_of(())
        )
        began = self._clock()
        reader.submit(jobs)
        for slot in slots.tolist():
            reader.wait(slot)
        seconds = self._clock() - began
        for slot in slots.tolist():
            if self._arena.states[slot] != READY:
                failure = reader.failure(slot)
                raise ReadError(
                    f"{self._index.files[failure.file]}, byte {failure.offset}: cannot be read "
                    f"({failure.reason.name.lower()}): check the drive"
                )
        return seconds

    def _forget(self, drives: Drives, records: NDArray[np.integer]) -> None:
        for record in records.tolist():
            for file, offset, nbytes in record_pieces(self._index, record):
                drop_cached(drives.files[0].fds[file], offset, nbytes)


def _room(index: ExpertIndex, arena: Arena, row: int) -> NDArray[np.int64]:
    """Slots for records of a layer, touched."""
    classes = slot_classes(index)
    number = next(i for i, found in enumerate(classes) if row in found.layers)
    most = max(1, _MOST_TOUCHED // classes[number].slot_nbytes)
    slots = np.array(arena.ranges[number][:most], np.int64)
    for slot in slots.tolist():
        start = int(arena.bases[slot])
        arena.data[start : start + classes[number].slot_nbytes : PAGE] = 0
    arena.touched[slots] = True
    return slots


def on_drive(index: ExpertIndex, directory: Path) -> ExpertIndex:
    """The index over a mirror's files; one that it does not have stays the model's own."""
    copies = [directory / path.name for path in index.files]
    files = [
        copy if copy.exists() else path for copy, path in zip(copies, index.files, strict=True)
    ]
    return replace(index, files=tuple(files))
