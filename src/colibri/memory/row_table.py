"""A matrix that stays on disk: its rows are read when they are asked for, each by its position.

For tables far larger than memory of which a token uses a few rows, such as hashed n-gram
embeddings. Rows go through the page cache, which keeps those that recur as long as the system has
memory to spare; none of it is the program's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.safetensors import TensorSpec
from colibri.errors import ReadError
from colibri.formats import Bytes, FloatFormat, Floats
from colibri.memory.files import OpenFiles

_THREADS = 8  # reads under way at once: what keeps a solid-state drive busy
_WORTH_A_THREAD = 8  # reads


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTableStats:
    """What a table has done: reads of one row each, and their bytes."""

    reads: int = 0
    bytes_read: int = 0


class RowTable:
    """Rows `[N, columns]` of shards that follow one another.

    Attributes:
        stats: what has been read so far.
    """

    def __init__(self, shards: Sequence[TensorSpec], fmt: FloatFormat) -> None:
        """Open the files of `shards`, matrices `[.., columns]` of `fmt`.

        Raises:
            ReadError: a file cannot be opened.
        """
        paths = list(dict.fromkeys(spec.file for spec in shards))
        self.num_rows, self.columns = sum(spec.shape[0] for spec in shards), shards[0].shape[1]
        self.stats = RowTableStats()
        self._format, self._paths = fmt, paths
        self._row_nbytes = fmt.nbytes((1, self.columns))
        self._ends = np.cumsum([spec.shape[0] for spec in shards])
        self._firsts = self._ends - [spec.shape[0] for spec in shards]
        self._offsets = np.array([spec.offset for spec in shards], np.int64)
        self._strides = np.array([spec.row_nbytes + spec.skip for spec in shards], np.int64)
        self._files = np.array([paths.index(spec.file) for spec in shards], np.int64)
        self._open = OpenFiles(paths, direct=False)
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "posix_fadvise"):
            for fd in self._open.fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def rows(self, numbers: NDArray[np.int64]) -> Floats:
        """Rows `numbers [..]` as float32 `[.., columns]`; each different one is read once.

        Raises:
            IndexError: there is no such row.
            ReadError: a file cannot be read, or has become shorter; names it and the byte.
        """
        wanted, places = np.unique(numbers, return_inverse=True)
        if wanted.size and not 0 <= wanted[0] <= wanted[-1] < self.num_rows:
            raise IndexError(f"the table has {self.num_rows} rows, not {wanted[0]} to {wanted[-1]}")
        found = np.empty((len(wanted), self._row_nbytes), np.uint8)
        shards = np.searchsorted(self._ends, wanted, side="right")
        offsets = self._offsets[shards] + (wanted - self._firsts[shards]) * self._strides[shards]
        self._read_all(self._files[shards], offsets, found)
        with self._lock:
            stats = self.stats
            self.stats = RowTableStats(
                reads=stats.reads + len(wanted), bytes_read=stats.bytes_read + found.nbytes
            )
        values = self._format.decode(found.reshape(-1), (len(wanted), self.columns))
        return values[places.reshape(numbers.shape)]

    def _read_all(self, files: NDArray[np.int64], offsets: NDArray[np.int64], out: Bytes) -> None:
        """Few reads one after the other, many on several threads."""
        parts = min(_THREADS, -(-len(offsets) // _WORTH_A_THREAD))
        if parts <= 1:
            self._read(files, offsets, out)
            return
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(_THREADS, "rows")
            pool = self._pool
        cuts = [(len(offsets) * i // parts, len(offsets) * (i + 1) // parts) for i in range(parts)]
        tasks = [pool.submit(self._read, files[a:b], offsets[a:b], out[a:b]) for a, b in cuts]
        for task in tasks:
            task.result()

    def _read(self, files: NDArray[np.int64], offsets: NDArray[np.int64], out: Bytes) -> None:
        for file, offset, row in zip(files.tolist(), offsets.tolist(), out, strict=True):
            try:
                count = os.preadv(self._open.fds[file], [row.data], offset)
            except OSError as problem:
                raise ReadError(
                    f"{self._paths[file]}, byte {offset}: a row of a table cannot be read"
                    f" ({os.strerror(problem.errno or 0)}): check the drive"
                ) from None
            if count < len(row):
                raise ReadError(
                    f"{self._paths[file]}, byte {offset}: wanted {len(row)} bytes of a table's row,"
                    f" found {count}: the file was cut while open; restore it"
                )

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._open.close()
