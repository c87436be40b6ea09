"""Weights that no cache holds: many matrices, every one at an address of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from colibri.checkpoint.random_weights import random_matrix
from colibri.checkpoint.record import RecordLayout
from colibri.errors import BudgetError, NativeLibraryError, RequestError, SettingsError
from colibri.formats import Bytes, FloatFormat, Floats, Format, IntegerFormat, Shape, padded
from colibri.kernels import why_reference
from colibri.kernels.api import Activations, Matrix
from colibri.kernels.mapping import Mapping, mapping_nbytes
from colibri.kernels.native import NativeKernels
from colibri.lab.pairs import Ring
from colibri.memory.budget import available_bytes
from colibri.settings import Settings
from colibri.units import format_bytes

ALIGN = 64
_RESERVE = 256 << 20  # what else the bench needs, and what the machine should keep


class BenchKernels(NativeKernels):
    """Native kernels of which one call can be kept, so that nothing but native code is timed."""

    _kept: tuple[str, tuple[Any, ...]] | None = None
    _keeping = _timing = False
    _native_s = 0.0

    def bare_matmul(self, matrix: Matrix, x: Floats, out: Floats) -> Callable[[], int]:
        """`out[...] = matmul(matrix, x)` as the native call alone, which returns 0."""
        name, (*arguments, _) = self._call_of(lambda: self.matmul(matrix, x))
        pointer = self._library.ffi.from_buffer("float[]", out)  # where the product goes
        return partial(getattr(self._library.lib, name), self._context, *arguments, pointer)

    def native_seconds(self, step: Callable[[], object]) -> float:
        """Do `step`; the time inside its native calls."""
        before = self._native_s
        self._timing = True
        try:
            step()
        finally:
            self._timing = False
        return self._native_s - before

    def _call_of(self, step: Callable[[], object]) -> tuple[str, tuple[Any, ...]]:
        """What `step` would call, which it does not."""
        self._keeping = True
        try:
            step()
        finally:
            self._keeping = False
        assert self._kept is not None
        return self._kept

    def _do(self, function: str, *arguments: Any) -> None:
        if self._keeping:
            self._kept = function, arguments
            return
        start = time.perf_counter() if self._timing else 0.0
        super()._do(function, *arguments)
        if self._timing:
            self._native_s += time.perf_counter() - start


def bench_kernels_of(settings: Settings, activations: Activations) -> BenchKernels:
    """The kernels to be measured.

    Raises:
        SettingsError: the settings ask for the reference, or for an instruction set that does not
            run here.
        NativeLibraryError: there is no library.
    """
    if settings.kernels == "reference":
        raise SettingsError("kernels is reference: only native kernels are measured; leave it out")
    reason = why_reference()
    if reason is not None:
        raise NativeLibraryError(f"only native kernels are measured, but {reason}")
    isa = None if settings.isa == "auto" else settings.isa
    return BenchKernels(settings.threads, activations, isa)


def check_room(nbytes: int, what: str) -> None:
    """Refuse what would push the machine out of memory.

    Raises:
        BudgetError: so much is not free.
    """
    free = available_bytes()
    if mapping_nbytes(nbytes) + _RESERVE > free:
        raise BudgetError(
            f"{what} takes {format_bytes(nbytes)}, and {format_bytes(free)} of memory are free: "
            "end other programs, or measure on a larger machine"
        )


def touched(nbytes: int, what: str) -> Mapping:
    """Memory that is resident from the start.

    Raises:
        BudgetError: so much is not free.
    """
    check_room(nbytes, what)
    mapping = Mapping(nbytes, what)
    mapping.data[::4096] = 0
    return mapping


class DistinctMatrices:
    """As many matrices `[N, K]` as a piece of memory holds, back to back.

    Attributes:
        memory: all of it.
        stride: bytes from one matrix to the next.
        count: matrices.
    """

    def __init__(self, memory: Bytes, fmt: Format, shape: Shape, rng: np.random.Generator) -> None:
        """Draw one matrix; the others are copies of it with their panels turned.

        Raises:
            RequestError: not one of them fits.
        """
        self.memory, self.format, self.shape = memory, fmt, shape
        self.nbytes = fmt.resident_nbytes(shape)
        self.stride = padded(self.nbytes, ALIGN)
        self.count = _at_least(1, memory.size // self.stride, f"{fmt} matrices {list(shape)}")
        base = draw(fmt, shape, rng)
        panel = fmt.panel_nbytes(shape[1])
        for index in range(self.count):
            memory[index * self.stride :][: self.nbytes] = _turned(base, panel, index)

    def matrix(self, index: int) -> Matrix:
        """One of them."""
        data = self.memory[index * self.stride :][: self.nbytes]
        return Matrix(self.format, *self.shape, data)


class DistinctExperts:
    """As many records of gated experts as a piece of memory holds.

    Attributes:
        memory: all of it.
        stride: bytes from one record to the next.
        count: records.
        offsets: `[count, 3]` where gate, up and down begin.
    """

    def __init__(
        self, memory: Bytes, layout: RecordLayout, rng: np.random.Generator, least: int = 1
    ) -> None:
        """Draw one expert; the others are copies of it with their panels turned.

        Raises:
            RequestError: fewer than `least` of them fit.
        """
        self.memory, self.layout, self.stride = memory, layout, layout.nbytes
        self.count = _at_least(least, memory.size // layout.nbytes, "experts")
        bases = [draw(p.format, (p.rows, p.columns), rng) for p in layout.parts]
        panels = [p.format.panel_nbytes(p.columns) for p in layout.parts]
        for index in range(self.count):
            gate, up, down = (_turned(b, p, index) for b, p in zip(bases, panels, strict=True))
            layout.assemble(gate, up, down, out=memory[index * self.stride :][: self.stride])
        starts = np.arange(self.count, dtype=np.int64) * self.stride
        self.offsets = starts[:, None] + np.array(layout.offsets, np.int64)

    def matrices(self, index: int) -> list[Matrix]:
        """The bytes of a record as three matrices whose panels do not alternate."""
        found = []
        for part, start in zip(self.layout.parts, self._plain_offsets(), strict=True):
            size = part.format.resident_nbytes((part.rows, part.columns))
            data = self.memory[index * self.stride + start :][:size]
            found.append(Matrix(part.format, part.rows, part.columns, data))
        return found

    def _plain_offsets(self) -> tuple[int, int, int]:
        gate, up, down = self.layout.offsets
        part = self.layout.parts[0]
        if part.panel_stride != part.format.panel_nbytes(part.columns):
            up = part.format.resident_nbytes((part.rows, part.columns))
        return gate, up, down


def draw(fmt: Format, shape: Shape, rng: np.random.Generator) -> Bytes:
    """A normal matrix whose rows have length one, as resident bytes."""
    deviation = shape[1] ** -0.5
    if isinstance(fmt, FloatFormat | IntegerFormat):
        return random_matrix(fmt, shape, rng, deviation)
    weights = rng.standard_normal(shape, np.float32) * np.float32(deviation)
    return fmt.pack(fmt.encode(weights), shape)


def _at_least(least: int, count: int, what: str) -> int:
    if count < least:
        raise RequestError(
            f"the working set holds {count} {what}, and {least} are needed: make it larger"
        )
    return count


def _turned(base: Bytes, panel_nbytes: int, by: int) -> Bytes:
    """The panels of a matrix moved up by `by`; as it is where panels are not all it consists of."""
    if base.size % panel_nbytes:
        return base
    at = by * panel_nbytes % base.size
    return np.concatenate([base[at:], base[:at]])


def read_turn(kernels: NativeKernels, memory: Bytes, ring: Ring, stride: int) -> float:
    """Read half a circle and nothing else; bytes per second."""
    spans = ring.take(max(1, ring.count // 2))
    start = time.perf_counter()
    for begin, end in spans:
        kernels.read_sum(memory[begin * stride : end * stride])
    seconds = time.perf_counter() - start
    return sum(end - begin for begin, end in spans) * stride / seconds
