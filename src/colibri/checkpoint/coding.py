"""Rounding floats to integer codes on their way into memory: what may be, and how dense ones go.

The numbers are those that `convert` would write: both take the formats' one encoder. Experts are
coded where they land (`experts`, native/pack.c), dense matrices here, in strips of whole panels, so
that no second copy of a matrix is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.storage import FLOAT_DTYPES, Storage, StoredMatrix
from colibri.checkpoint.strict_json import shown
from colibri.errors import NumericsError, SettingsError, UnsupportedModelError
from colibri.formats import (
    F16,
    F32,
    FORMATS,
    PANEL_ROWS,
    Bytes,
    Format,
    FP8Format,
    IntegerFormat,
    Shape,
)
from colibri.formats.packing import Items, Packing, PackKind, item_nbytes
from colibri.kernels.packing import pack

CODINGS: dict[str, IntegerFormat] = {
    fmt.name: fmt for fmt in FORMATS.values() if isinstance(fmt, IntegerFormat) and fmt.scale is F16
}
_STRIP_NBYTES = 4 << 20


class Coding(NamedTuple):
    """What is rounded while a checkpoint is loaded; None leaves it as it is stored.

    Attributes:
        dense: format of dense matrices and of the embedding.
        experts: format of routed experts.
    """

    dense: IntegerFormat | None = None
    experts: IntegerFormat | None = None

    @classmethod
    def named(cls, dense: str | None, experts: str | None) -> Coding:
        """By the names of the formats.

        Raises:
            SettingsError: a format to which nothing is rounded at load.
        """
        return cls(_coding("dense", dense), _coding("experts", experts))


NO_CODING = Coding()


def _coding(setting: str, name: str | None) -> IntegerFormat | None:
    if name is not None and name not in CODINGS:
        raise SettingsError(f"{setting} is {name!r}: it must be one of {', '.join(CODINGS)}")
    return None if name is None else CODINGS[name]


def require_exact(old: Format, new: Format, what: str) -> None:
    """Integer codes may become f32, which holds every one; fp8 is how models are published.

    Raises:
        UnsupportedModelError: codes would be rounded a second time.
    """
    if old.is_coded and old is not new and new is not F32:
        raise UnsupportedModelError(
            f"{what} is {old.name} and would be rounded a second time to {new.name}; take the"
            " original checkpoint instead, or keep the codes or widen them to f32"
        )


def encoding(
    storage: Storage,
    shape: Shape,
    codes: Items,
    scales: Items | None,
    fmt: IntegerFormat,
    *,
    part: int = 0,
    stride: int = 0,
) -> Packing:
    """The step that rounds a matrix of floats or fp8 to `fmt`, `stride` from panel to panel."""
    rounding = Packing(PackKind.ENCODE, part, False, 0, *shape, codes, scales, storage.block)
    return rounding._replace(bits=fmt.bits, group=fmt.group, panel_stride=stride)


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """A dense matrix of floats or fp8 in files.

    Attributes:
        storage: how it is stored.
        shape: `[N, K]`.
        codes: the tensor of floats or codes.
        scales: the tensor of scales, where it has any.
        scales_at: where in that tensor the scales begin.
    """

    storage: Storage
    shape: Shape
    codes: TensorSpec
    scales: TensorSpec | None = None
    scales_at: int = 0

    @classmethod
    def of(
        cls, stored: Format, shape: Shape, spec: TensorSpec, matrix: StoredMatrix | None
    ) -> FloatMatrix:
        """A matrix with codes and scales, a plain tensor, or resident fp8 of a container."""
        if matrix is not None:
            return cls(matrix.storage, shape, matrix.codes, matrix.scales)
        if isinstance(stored, FP8Format):
            return cls(Storage.of_resident(stored), shape, spec, spec, stored.scales_at(shape))
        return cls(Storage(FLOAT_DTYPES[spec.dtype], spec.dtype, ""), shape, spec)

    def encode(self, fmt: IntegerFormat, out: Bytes, num_threads: int) -> None:
        """Write the resident bytes of its numbers, rounded to `fmt`, to `out`.

        Raises:
            CheckpointError: a file cannot be read or has become shorter.
            NumericsError: a number is not finite, or beyond what `fmt` can hold.
        """
        with ThreadPoolExecutor(num_threads) as pool:  # files and the library leave the GIL alone
            tasks = [pool.submit(self._encode_rows, fmt, out, *rows) for rows in self._strips()]
            for task in tasks:
                task.result()

    def encoders(self, fmt: IntegerFormat) -> Iterator[Callable[[], Bytes]]:
        """The same strip by strip, in the order of the resident bytes; errors as for `encode`."""
        for first, last in self._strips():
            yield partial(self._encoded_strip, fmt, first, last)

    def _encoded_strip(self, fmt: IntegerFormat, first: int, last: int) -> Bytes:
        out = np.empty(fmt.resident_nbytes((last - first, self.shape[1])), np.uint8)
        self._encode_rows(fmt, out, first, last, first)
        return out

    def _strips(self) -> Iterator[tuple[int, int]]:
        """Rows `[first, last)` of whole panels and blocks of scales."""
        rows, unit = self.shape[0], math.lcm(PANEL_ROWS, self.storage.block[0])
        row = self.storage.row_nbytes(self.shape[1])
        height = max(1, _STRIP_NBYTES // (unit * row)) * unit
        return ((first, min(first + height, rows)) for first in range(0, rows, height))

    def _encode_rows(
        self, fmt: IntegerFormat, out: Bytes, first: int, last: int, begin: int = 0
    ) -> None:
        """Write rows `[first, last)` where `out` begins with row `begin`."""
        storage, columns, block = self.storage, self.shape[1], self.storage.block[0]
        row, panel = storage.row_nbytes(columns), fmt.panel_nbytes(columns)
        shape = (last - first, columns)
        pieces = [read_tensor(_part(self.codes, first * row, shape[0] * row))]
        codes, scales = Items(0, storage.item, 0, row, item_nbytes(storage.item)), None
        if self.scales is not None:
            lines, per_line = storage.blocks(*shape)
            line = per_line * storage.scale_nbytes
            start = self.scales_at + first // block * line
            pieces.append(read_tensor(_part(self.scales, start, lines * line)))
            scales = storage.scale_items(1, 0, line)
        step = encoding(storage, shape, codes, scales, fmt, stride=panel)
        if not pack(step, pieces, out[(first - begin) // PANEL_ROWS * panel :]):
            raise NumericsError(
                f"{self.codes.file}: tensor {shown(self.codes.name)}, rows {first} to {last - 1}:"
                f" a weight is not finite or too large for {fmt.name}; fetch the file again, or"
                " leave the dense part as it is stored"
            )


def _part(spec: TensorSpec, start: int, nbytes: int) -> TensorSpec:
    """Bytes of a tensor, whole rows where others lie between them."""
    if not spec.skip:
        return replace(spec, offset=spec.offset + start, nbytes=nbytes)
    first, count = start // spec.row_nbytes, nbytes // spec.row_nbytes
    offset = spec.offset + first * (spec.row_nbytes + spec.skip)
    return replace(spec, shape=(count, spec.shape[-1]), offset=offset, nbytes=nbytes)
