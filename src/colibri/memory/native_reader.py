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
from colibri.memory.files import OpenFiles
from colibri.memory.forked import LIVING
from colibri.memory.jobs import Failure, Jobs, ReaderStats, Reason

_WAIT_MS = 100  # Ctrl-C gets through between two waits
_COLUMNS = (
    ("slots", np.int32),
    ("files", np.int32),
    ("offsets", np.int64),
    ("nbytes", np.int64),
    ("targets", np.int64),
)
_STATS = ("records", "failed", "reads", "bytes_read", "slack_bytes")


class NativeReader:
    """A `Reader` over the library."""

    def __init__(
        self,
        library: Library,
        arena: Arena,
        files: OpenFiles,
        max_pieces: int,
        num_threads: int = 4,
    ) -> None:
        """Start the threads; `files` belongs to the reader from now on.

        Raises:
            ReadError: no thread can be started.
        """
        self._ffi, self._lib = library.ffi, library.lib
        self._states, self._files = arena.states, files
        self._state_words = self._ffi.from_buffer("int32_t[]", arena.states)
        self._scans: dict[int, tuple[NDArray[np.int64], Any]] = {}
        self._stats = ReaderStats()
        self._guard = threading.Lock()  # nobody is in the library while the reader is freed
        pinned = (
            self._ffi.from_buffer("uint8_t[]", arena.data),
            self._ffi.from_buffer("int64_t[]", arena.parts),
        )
        fds, direct = (np.array(column, np.int32) for column in (files.fds, files.direct))
        handle = self._lib.colibri_reader_create(
            *pinned,
            self._state_words,
            arena.num_slots,
            max_pieces,
            self._pointer(fds),
            self._pointer(direct),
            len(fds),
            num_threads,
        )
        if handle == self._ffi.NULL:
            raise ReadError(
                f"the reader cannot start its threads (errno {self._ffi.errno}): "
                "raise the limit on processes, or free memory"
            )
        # It keeps alive what the threads write to, and ends them even if nobody calls close.
        keep = (arena, *pinned, self._state_words, self._scans)
        self._handle: Any = handle
        self._end = weakref.finalize(self, _end, self._lib, handle, files, keep)
        LIVING.add(self)

    def submit(self, jobs: Jobs) -> None:
        """Queue the jobs in one call that Ctrl-C cannot interrupt; see `Reader.submit`."""
        columns = [np.ascontiguousarray(getattr(jobs, name), kind) for name, kind in _COLUMNS]
        slots, *pieces = map(self._pointer, columns)
        num_jobs, num_pieces = columns[1].shape
        crcs = self._ffi.NULL
        if jobs.crcs is not None:
            crcs = self._pointer(np.ascontiguousarray(jobs.crcs, np.uint32))
        checks = (crcs, self._scan_pointer(jobs.scans), len(jobs.scans))
        with self._guard:
            if self._handle is None:
                raise ReadError("the expert store is closed: open the model again")
            self._lib.colibri_reader_submit(
                self._handle, num_jobs, slots, num_pieces, *pieces, *checks, jobs.prefetch
            )

    def promote(self, slots: NDArray[np.integer]) -> None:
        """Move waiting prefetches to the end of the demand queue."""
        with self._guard:
            if self._handle is not None:
                for slot in slots.tolist():
                    self._lib.colibri_reader_promote(self._handle, slot)

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
        return Failure(Reason(found.reason), found.error, found.file, found.offset, found.part)

    def stats(self) -> ReaderStats:
        """Sums since the start."""
        found = self._ffi.new("colibri_reader_stats *")
        with self._guard:
            if self._handle is not None:
                self._lib.colibri_reader_get_stats(self._handle, found)
                self._stats = ReaderStats(*(getattr(found, name) for name in _STATS))
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

    def _scan_pointer(self, scans: NDArray[np.int64]) -> Any:
        """The array as the library sees it; kept, because jobs refer to it."""
        if id(scans) not in self._scans:
            self._scans[id(scans)] = (scans, self._ffi.cast("colibri_scan *", self._pointer(scans)))
        return self._scans[id(scans)][1]

    def _pointer(self, array: NDArray[Any]) -> Any:
        """A typed pointer that keeps a contiguous array alive."""
        kind = "uint32_t[]" if array.dtype == np.uint32 else f"int{array.dtype.itemsize * 8}_t[]"
        return self._ffi.from_buffer(kind, array)


def _end(lib: Any, handle: Any, files: OpenFiles, _keep: tuple[Any, ...]) -> None:
    lib.colibri_reader_close(handle)
    files.close()
