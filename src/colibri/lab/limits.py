"""What the machine could do at most: its drive, its memory and its arithmetic, each alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from colibri.checkpoint.experts import PAGE, ExpertIndex
from colibri.formats import Bytes, padded
from colibri.kernels.api import READY, Matrix, Routing, Slots
from colibri.kernels.mapping import Mapping
from colibri.lab.inputs import gaussian
from colibri.lab.pairs import Ring
from colibri.lab.routed import sparse_layers
from colibri.lab.working_set import BenchKernels, read_turn, touched
from colibri.memory.devices import Reading
from colibri.memory.files import OpenFiles
from colibri.memory.mirror import record_pieces
from colibri.memory.system import drop_cached
from colibri.models.model import Model

SAMPLE_BYTES = 384 << 20  # of one sample of the drive
MOST_DEPTH = 8
_LANDING = 32 << 20  # each thread reads into so much memory, in a circle
_DRAM = 1 << 30
_CACHED = 1 << 20  # bytes of a matrix that the caches of two cores hold
_SAMPLE_S, _LEAST_CALLS = 0.02, 5  # of arithmetic


class DriveLimit:
    """The rate at which bare threads read records, with nothing else to do.

    Attributes:
        reading: how they do.
        bytes_read: so far.
    """

    def __init__(
        self, index: ExpertIndex, reading: Reading, *, drops: bool = True, seed: int = 0
    ) -> None:
        """`reading` says how: as the engine does. `drops`: before, from the page cache."""
        self._index, self.reading, self._drops = index, reading, drops
        self.bytes_read = 0
        self._files = OpenFiles(index.files, reading.direct)
        self._records = np.flatnonzero((index.file[:, :, 0] >= 0).ravel())
        self._random = np.random.default_rng(seed)
        landing = max(MOST_DEPTH, reading.threads) * _LANDING
        total = padded(int(index.nbytes.sum()), PAGE)
        self._memory = touched(min(landing, 8 * total), "the buffers of the bench")

    def sample(self, nbytes: int = SAMPLE_BYTES) -> float:
        """Bytes per second of reading about so much."""
        return self.rate(self.reading.block, self.reading.threads, nbytes)

    def rate(self, block: int, depth: int, nbytes: int = SAMPLE_BYTES) -> float:
        """The same for reads of `block` bytes (0: whole records), `depth` at a time."""
        total = int(self._index.nbytes.sum())
        count = round(min(nbytes, total) / total * len(self._records))
        chosen = self._random.choice(self._records, max(depth, count))
        blocks = [piece for record in chosen.tolist() for piece in self._blocks(record, block)]
        if self._drops:
            self.forget()
        work = iter(blocks)  # shared: whoever is free takes the next
        size = self._memory.data.size // depth
        buffers = [self._memory.data[n * size : (n + 1) * size] for n in range(depth)]
        threads = [threading.Thread(target=self._read, args=(work, b)) for b in buffers]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        nbytes = sum(n for _, _, n in blocks)
        self.bytes_read += nbytes
        return nbytes / seconds

    def forget(self) -> None:
        """Drop the files from the page cache."""
        for fd in self._files.fds:
            drop_cached(fd, 0, 0)

    def _blocks(self, record: int, block: int) -> Iterator[tuple[int, int, int]]:
        for file, offset, nbytes in record_pieces(self._index, record):
            first, last = offset // PAGE * PAGE, -(-(offset + nbytes) // PAGE) * PAGE
            step = block or last - first
            for start in range(first, last, step):
                yield file, start, min(step, last - start)

    def _read(self, work: Iterator[tuple[int, int, int]], buffer: Bytes) -> None:
        at = 0
        for file, offset, nbytes in work:
            if at + nbytes > buffer.size:
                at = 0
            os.preadv(self._files.fds[file], [buffer[at : at + nbytes].data], offset)
            at += -(-nbytes // PAGE) * PAGE

    def close(self) -> None:
        """Give files and memory back."""
        self._files.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class MemoryLimit:
    """The rate at which the threads of the kernels read memory, without computing."""

    def __init__(self, kernels: BenchKernels, nbytes: int = _DRAM) -> None:
        self._kernels = kernels
        self._memory = touched(nbytes, "the working set")
        self._ring = Ring(8)

    def sample(self) -> float:
        """Bytes per second."""
        stride = self._memory.data.size // self._ring.count
        return read_turn(self._kernels, self._memory.data, self._ring, stride)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Least times of one step, in seconds, by what limits it.

    Attributes:
        io_s: reading what misses.
        dram_s: reading every weight that is used, once, from memory.
        compute_s: the arithmetic, with weights and inputs in cache.
        head_s: what of both the output matrix takes at least. No expert of the next token is known
            before, nor is one of this token missing then: the drive has nothing to do.
    """

    io_s: float
    dram_s: float
    compute_s: float
    head_s: float = 0.0

    @property
    def seconds(self) -> float:
        """No step is faster."""
        return max(self.io_s + self.head_s, self.dram_s, self.compute_s)

    @property
    def bound(self) -> str:
        """What limits it."""
        times = {"disk": self.io_s + self.head_s, "memory": self.dram_s, "compute": self.compute_s}
        return max(times, key=lambda name: times[name])


class ArithmeticLimit:
    """How fast the kernels compute a model's matrices when these lie in cache.

    One expert is computed again and again, and so are the first rows of a dense matrix, each small
    enough for the caches of the cores. Native time alone counts.
    """

    def __init__(self, kernels: BenchKernels, model: Model, slot_nbytes: int) -> None:
        """`slot_nbytes` are those of a record with what lies between its parts."""
        self._kernels, self._model, self._slot_nbytes = kernels, model, slot_nbytes
        self._sparse = sparse_layers(model)
        self._steps: dict[tuple[str, int], Callable[[], object]] = {}

    def expert_s(self, num_tokens: int) -> float:
        """Seconds of one expert over so many tokens."""
        step = self._steps.get(("expert", num_tokens)) or self._expert(num_tokens)
        self._steps["expert", num_tokens] = step
        return self._timed(step)

    def dense_s(self, num_tokens: int, nbytes: int) -> float:
        """Seconds of dense matrices of `nbytes` in all, over so many tokens."""
        part = _first_rows(self._model.trunk.head.lm_head)
        x = gaussian(np.random.default_rng(0), num_tokens, part.columns)
        return nbytes / _nbytes(part) * self._timed(lambda: self._kernels.matmul(part, x))

    def _timed(self, step: Callable[[], object]) -> float:
        times: list[float] = []
        step()
        while sum(times) < _SAMPLE_S or len(times) < _LEAST_CALLS:
            times.append(self._kernels.native_seconds(step))
        return float(np.median(times))

    def _expert(self, num_tokens: int) -> Callable[[], object]:
        """A step with one expert, in a place of its own."""
        ffn, store = self._sparse[0], self._model.store
        one = np.zeros(1, np.int32)
        with store.lease(ffn.layer, one) as slots:
            store.table.wait(int(slots[0]))
            parts = store.table.parts[int(slots[0])]
            start = int(parts.min())
            copy = _copied(store.table.arena, start, self._slot_nbytes)
        states = np.full(1, READY, np.int32)
        table = Slots(copy.data, (parts - start)[None], states, lambda slot: None)
        hidden = gaussian(np.random.default_rng(0), num_tokens, ffn.experts.gate_proj.columns)
        weights = np.ones((num_tokens, 1), np.float32)
        routing = Routing(hidden, np.zeros((num_tokens, 1), np.int32), weights, one)
        y = np.zeros_like(hidden)
        return lambda: self._kernels.moe_step(ffn.experts, routing, one, one, table, y)


def _copied(arena: Bytes, start: int, nbytes: int) -> Mapping:
    """The bytes from `start`, at most `nbytes`: of the last slot there may be fewer."""
    mapping = Mapping(nbytes, "an expert")
    found = arena[start : start + nbytes]
    mapping.data[: len(found)] = found
    return mapping


def _first_rows(matrix: Matrix) -> Matrix:
    """So many rows that they stay in cache."""
    of_row = max(1, _nbytes(matrix) // matrix.rows)
    rows = max(8, min(matrix.rows, _CACHED // of_row) // 8 * 8)
    nbytes = matrix.format.resident_nbytes((rows, matrix.columns))
    return Matrix(matrix.format, rows, matrix.columns, matrix.data[:nbytes])


def _nbytes(matrix: Matrix) -> int:
    return matrix.format.resident_nbytes((matrix.rows, matrix.columns))
