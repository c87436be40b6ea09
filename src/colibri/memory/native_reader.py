"""Reading records on the library's own threads, which never take the GIL (native/reader.c)."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.errors import ReadError
from colibri.kernels.api import FAILED, LOADING
from colibri.kernels.library import Library
from colibri.memory.arena import Arena
from colibri.memory.drives import Drives
from colibri.memory.forked import LIVING
from colibri.memory.jobs import Failure, Jobs, Queue, ReaderStats, Reason

_WAIT_MS = 100  # Ctrl-C gets through between two waits
_COLUMNS = (
    ("slots", np.int32),
    ("files", np.int32),
    ("offsets", np.int64),
    ("nbytes", np.int64),
    ("targets", np.int64),
    ("bases", np.int64),
)
_C_TYPES = {
    "<i4": "int32_t[]",
    "<i8": "int64_t[]",
    "<u4": "uint32_t[]",
    "|u1": "uint8_t[]",
}
_STATS = ("records", "failed", "reads", "bytes_read", "slack_bytes", "rescued", "abandoned_bytes")


class NativeReader:
    """A `Reader` over the library."""

    def __init__(
        self,
        library: Library,
        arena: Arena,
        drives: Drives,
        max_pieces: int,
        num_threads: int = 4,
        block: int = 0,
    ) -> None:
        """Start the threads; `drives` belongs to the reader from now on.

        Pieces are read in blocks of about `block` bytes, 0 for whole.

        Raises:
            ReadError: no thread can be started.
        """
        self._ffi, self._lib = library.ffi, library.lib
        self._states, self._drives = arena.states, drives
        self._state_words = self._ffi.from_buffer("int32_t[]", arena.states)
        self._scans: dict[int, tuple[NDArray[np.int64], Any]] = {}
        self._jobs = self._ffi.new("colibri_jobs *")
        self._stats = ReaderStats()
        self._guard = threading.Lock()  # nobody is in the library while the reader is freed
        pinned = (
            self._ffi.from_buffer("uint8_t[]", arena.data),
            self._ffi.from_buffer("int64_t[]", arena.parts),
            self._ffi.from_buffer("uint8_t[]", arena.staging),
        )
        places, *kept = self._places(drives)
        handle = self._lib.colibri_reader_create(
            *pinned[:2],
            self._state_words,
            arena.num_slots,
            max_pieces,
            places,
            num_threads,
            block,
            pinned[2],
            arena.staging.shape[1],
            len(arena.staging),
        )
        del kept  # the library has its own copy
        if handle == self._ffi.NULL:
            raise ReadError(
                f"the reader cannot start its threads (errno {self._ffi.errno}): "
                "raise the limit on processes, or free memory"
            )
        # It keeps alive what the threads write to, and ends them even if nobody calls close.
        keep = (arena, *pinned, self._state_words, self._scans)
        self._handle: Any = handle
        self._end = weakref.finalize(self, _end, self._lib, handle, drives, keep)
        LIVING.add(self)

    def submit(self, jobs: Jobs) -> None:
        """Queue the jobs in one call that Ctrl-C cannot interrupt; see `Reader.submit`."""
        crcs, checks = self._drives.checks(jobs)
        asked: list[tuple[str, NDArray[Any] | None]] = [
            (name, np.ascontiguousarray(getattr(jobs, name), kind)) for name, kind in _COLUMNS
        ]
        asked += ("crcs", crcs), ("checks", checks), ("drives", self._drives.sets(jobs))
        with self._guard:
            if self._handle is None:
                raise ReadError("the expert store is closed: open the model again")
            for name, column in asked:
                setattr(self._jobs, name, self._optional(column))
            self._jobs.scans, self._jobs.num_scans = self._kept(jobs.scans, "scan"), len(jobs.scans)
            self._jobs.packings = self._kept(jobs.steps, "packing")
            self._jobs.num_packings = len(jobs.steps)
            self._jobs.staged = self._optional(jobs.staged if jobs.staged.size else None)
            self._jobs.num_pieces, self._jobs.queue = jobs.files.shape[1], int(jobs.queue)
            self._lib.colibri_reader_submit(self._handle, len(jobs.slots), self._jobs)
            self._report_dropped()

    def promote(self, slots: NDArray[np.integer], queue: Queue = Queue.DEMAND) -> int:
        """Move what waits in a later queue; see `Reader.promote`."""
        with self._guard:
            if self._handle is None:
                return 0
            promote, number = self._lib.colibri_reader_promote, int(queue)
            return sum(promote(self._handle, slot, number) for slot in slots.tolist())

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Call off what nobody demanded; see `Reader.withdraw`."""
        with self._guard:
            if self._handle is None:
                return np.zeros(len(slots), bool)
            answers = [self._lib.colibri_reader_withdraw(self._handle, s) for s in slots.tolist()]
        return np.array(answers, bool)

    def wait(self, slot: int) -> None:
        """Sleep on the slot's state word until it has landed or failed."""
        word = self._state_words + slot
        while self._lib.colibri_slot_wait(word, _WAIT_MS) == LOADING:
            pass

    def failure(self, slot: int) -> Failure:
        """Why the slot failed."""
        found = self._ffi.new("colibri_failure *")
        with self._guard:
            if self._handle is None:
                return Failure(Reason.CANCELLED)
            self._lib.colibri_reader_failure(self._handle, slot, found)
        return _failure(found)

    def times(self, slot: int) -> tuple[tuple[int, int, int], int]:
        """See `TimedReader.times`."""
        found = self._ffi.new("int64_t[3]")
        with self._guard:
            if self._handle is None:
                return (0, 0, 0), int(Reason.CANCELLED)
            reason = self._lib.colibri_reader_times(self._handle, slot, found)
        return (found[0], found[1], found[2]), reason

    def queues(self) -> tuple[int, int, int, int]:
        """See `Reader.queues`."""
        found = self._ffi.new("int32_t[4]")
        with self._guard:
            if self._handle is not None:
                self._lib.colibri_reader_queues(self._handle, found)
        return found[0], found[1], found[2], found[3]

    def stats(self) -> ReaderStats:
        """Sums since the start."""
        found = self._ffi.new("colibri_reader_stats *")
        with self._guard:
            if self._handle is not None:
                self._lib.colibri_reader_get_stats(self._handle, found)
                self._report_dropped()
                sums = {name: getattr(found, name) for name in _STATS}
                given = tuple(self._drive(number)[0] for number in range(len(self._drives.files)))
                self._stats = ReaderStats(**sums, drive_bytes=given)
        return self._stats

    def close(self) -> None:
        """Cancel what waits, finish what is being read."""
        LIVING.discard(self)
        self.stats()
        with self._guard:
            self._handle = None
            self._end()

    def abandon(self) -> None:
        """In a forked child; see `Abandonable`. The library's lock may be held for ever."""
        self._guard = threading.Lock()
        self._end.detach()
        self._handle = None
        self._states[self._states == LOADING] = FAILED

    def _places(self, drives: Drives) -> tuple[Any, ...]:
        """`colibri_drives *`, and what it points to."""
        fds = np.array([files.fds for files in drives.files], np.int32)
        direct = np.array([files.direct for files in drives.files], np.int32)
        weights = np.array(drives.weights, np.int64)
        found = self._ffi.new("colibri_drives *")
        found.num_drives, found.num_files = fds.shape
        found.keep_cache = drives.keep_cache
        pointers = [self._pointer(array) for array in (fds, direct, weights)]
        found.fds, found.direct, found.weights = pointers
        return found, fds, direct, weights, pointers

    def _report_dropped(self) -> None:
        """Say which mirrors were dropped; the guard is held."""
        dropped = self._lib.colibri_reader_dropped(self._handle)
        for drive in range(1, len(self._drives.files) if dropped else 1):
            if dropped >> drive & 1 and drive not in self._drives.dropped:
                self._drives.drop(drive, self._drive(drive)[1])

    def _drive(self, drive: int) -> tuple[int, Failure]:
        """Useful bytes that it gave, and why it was dropped, if it was; the guard is held."""
        nbytes, failure = self._ffi.new("int64_t *"), self._ffi.new("colibri_failure *")
        self._lib.colibri_reader_drive(self._handle, drive, nbytes, failure)
        return nbytes[0], _failure(failure) if failure.reason else Failure(Reason.CANCELLED)

    def _kept(self, rows: NDArray[np.int64], kind: str) -> Any:
        """The array as the library sees it; kept, because jobs refer to it."""
        if id(rows) not in self._scans:
            pointer = self._ffi.cast(f"colibri_{kind} *", self._pointer(rows))
            self._scans[id(rows)] = (rows, pointer)
        return self._scans[id(rows)][1]

    def _optional(self, array: NDArray[Any] | None) -> Any:
        return self._ffi.NULL if array is None else self._pointer(array)

    def _pointer(self, array: NDArray[Any]) -> Any:
        """A typed pointer that keeps a contiguous array alive."""
        return self._ffi.from_buffer(_C_TYPES[array.dtype.str], array)


def _failure(found: Any) -> Failure:
    reason = Reason(found.reason)
    return Failure(reason, found.error, found.file, found.offset, found.part, found.drive)


def _end(lib: Any, handle: Any, drives: Drives, _keep: tuple[Any, ...]) -> None:
    lib.colibri_reader_close(handle)
    drives.close()
