"""Experts where the kernel's page cache puts them: files mapped into memory, computed in place.

This is what engines do that leave streaming to the system, and so the measure of what ours is
worth: the same kernels, the same routing, the same memory, and page faults in place of reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from colibri.checkpoint.experts import PAGE, ExpertIndex
from colibri.errors import BudgetError
from colibri.formats import Bytes, padded
from colibri.kernels.api import READY, Ints, Slots
from colibri.kernels.native import NativeKernels
from colibri.memory.expert_store import ExpertStore
from colibri.memory.mirror import record_pieces
from colibri.memory.store_stats import StoreStats
from colibri.memory.system import drop_cached
from colibri.models.model import Model

_FIXED, _FAILED = 0x10, ctypes.c_void_p(-1).value


class MappedExperts:
    """Files of a checkpoint mapped one behind the other, with the system's own read-ahead.

    Only for records that lie in the files as they lie in slots. The mapping lasts as long as the
    process.

    Attributes:
        table: as kernels take it; slot numbers are those of the records.
    """

    def __init__(self, index: ExpertIndex) -> None:
        self._index = index
        sizes = [padded(path.stat().st_size, PAGE) for path in index.files]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._fds = [os.open(path, os.O_RDONLY) for path in index.files]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        size_t, number = ctypes.c_size_t, ctypes.c_int
        sizes_of = (ctypes.c_void_p, size_t, number, number, number, ctypes.c_long)
        self._libc.mmap.argtypes = sizes_of
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        total = int(self._starts[-1])
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._base = self._map(None, total, 0, flags, -1)
        for fd, start, size in zip(self._fds, self._starts.tolist(), sizes, strict=False):
            self._map(self._base + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, fd)
        whole = (ctypes.c_uint8 * total).from_address(self._base)
        data: Bytes = np.ctypeslib.as_array(whole)
        self._present = np.flatnonzero((index.file[:, :, 0] >= 0).ravel())
        states = np.full(index.file.shape[0] * index.file.shape[1], READY, np.int32)
        self.table = Slots(data, self._parts(), states, lambda slot: None)
        self._random = np.random.default_rng(0)

    def serve(self, model: Model) -> None:
        """Let a model compute with these in place of its store's."""
        model.store = cast(ExpertStore, _MappedStore(self.table, self._index, model.store))

    def rate(self, kernels: NativeKernels, nbytes: int) -> float:
        """Bytes per second at which the kernels' threads read records that are not in memory."""
        mean = int(self._index.nbytes.sum()) / len(self._present)
        chosen = self._random.permutation(self._present)[: max(1, round(nbytes / mean))]
        ranges = [piece for record in chosen.tolist() for piece in self._ranges(record)]
        for start, size in ranges:
            self._drop(start, size)
        began = time.perf_counter()
        for start, size in ranges:
            kernels.read_sum(self.table.arena[start : start + size])
        return sum(size for _, size in ranges) / (time.perf_counter() - began)

    def _ranges(self, record: int) -> Iterator[tuple[int, int]]:
        for file, offset, nbytes in record_pieces(self._index, record):
            yield int(self._starts[file]) + offset, nbytes

    def _drop(self, start: int, nbytes: int) -> None:
        """Take pages out of this process, then out of the cache."""
        first, last = start // PAGE * PAGE, padded(start + nbytes, PAGE)
        self._libc.madvise(self._base + first, last - first, mmap.MADV_DONTNEED)
        file = int(np.searchsorted(self._starts, start, side="right")) - 1
        drop_cached(self._fds[file], first - int(self._starts[file]), last - first)

    def _parts(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """`[M * E, 3]` where gate, up and down begin."""
        index = self._index
        found = np.zeros((*index.file.shape[:2], 3), np.int64)
        for row, layout in enumerate(index.layers):
            for part, piece in enumerate(layout.part_pieces):
                starts = self._starts[index.file[row, :, piece]] + index.offset[row, :, piece]
                found[row, :, part] = starts + layout.part_deltas[part]
        return found.reshape(-1, 3)

    def _map(self, address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
        found = self._libc.mmap(address, nbytes, access, flags, fd, 0)
        if found == _FAILED:
            raise BudgetError(f"the files cannot be mapped (errno {ctypes.get_errno()})")
        return int(found)


class _MappedStore:
    """What layers ask of a store, where everything is always there."""

    def __init__(self, table: Slots, index: ExpertIndex, inner: ExpertStore) -> None:
        self.table, self._index, self._inner = table, index, inner
        self.num_experts = int(inner.num_experts)

    @contextmanager
    def lease(self, layer: int, experts: Ints) -> Iterator[Ints]:
        """Slots are numbers of records."""
        yield (self._index.position[layer] * self.num_experts + experts).astype(np.int32)

    def capacity(self, layer: int) -> int:
        """Of a lease."""
        return self.num_experts

    @property
    def stats(self) -> StoreStats:
        """Nothing is read by the engine."""
        return self._inner.stats
