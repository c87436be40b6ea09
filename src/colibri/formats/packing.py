"""From the bytes of a checkpoint to resident bytes, whatever their strides, item by item.

A `Packing` makes one matrix, or one part of it, out of the pieces of a record: items of any layout
become a row-major matrix of floats, codes of 4 bits become panels, scales become float32, floats
become integer codes. Only the last rounds. This is the twin of native/pack.c, which does the same
where records land; `row` is how native code is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.formats.base import (
    PANEL_ROWS,
    SCAN_BF16,
    SCAN_E4M3,
    SCAN_E8M0,
    SCAN_F16,
    SCAN_F32,
    Bytes,
    Floats,
    Shape,
    padded,
)
from colibri.formats.float import BF16
from colibri.formats.fp8 import E4M3
from colibri.formats.ggml import BY_NUMBER, BlockType
from colibri.formats.integer import IntegerFormat
from colibri.formats.microscaling import power_of_two
from colibri.formats.panels import interleave

# Kinds of items: those of `Scan`, and two codes to a byte, the even column in the low half.
ITEM_F32, ITEM_F16, ITEM_BF16, ITEM_E8M0, ITEM_E4M3 = (
    *(SCAN_F32, SCAN_F16, SCAN_BF16, SCAN_E8M0, SCAN_E4M3),
)
ITEM_NIBBLE = 5
ITEM_BLOCK = 64  # and on: blocks of ggml's type of that number, each an item
_DTYPES: dict[int, np.dtype[Any]] = {
    **{ITEM_F32: np.dtype("<f4"), ITEM_F16: np.dtype("<f2"), ITEM_BF16: np.dtype("<u2")},
    **{ITEM_E8M0: np.dtype("u1"), ITEM_E4M3: np.dtype("u1"), ITEM_NIBBLE: np.dtype("u1")},
}
FIELDS = 23  # of `Packing.row`
INT4_ZERO = 0x88  # two codes that stand for 0; in mxfp4 it is 0x00


def item_nbytes(kind: int) -> int:
    """Bytes of one item of a kind; a byte holds two nibbles."""
    if kind >= ITEM_BLOCK:
        return BY_NUMBER[kind - ITEM_BLOCK].nbytes
    return _DTYPES[kind].itemsize


class PackKind(IntEnum):
    """What a packing does; the numbers are those of native/abi_pack.cdef."""

    MOVE = 0  # items, row by row
    FLOATS = 1  # items widened to float32, row by row, each for a block of the result
    PANELS = 2  # nibbles and their scales, eight rows together
    ENCODE = 3  # floats rounded to integer codes, eight rows together
    BLOCKS = 4  # blocks of a GGUF file, eight rows together, in the resident format of their type


class Items(NamedTuple):
    """Where a matrix of items lies: item `[r, c]` at `start + r * row_step + c * column_step`.

    Attributes:
        piece: which of the record's pieces.
        kind: one of `ITEM_*`.
        start: bytes into the piece.
        row_step: bytes from row to row.
        column_step: bytes from column to column; nibbles follow one another.
    """

    piece: int
    kind: int
    start: int
    row_step: int
    column_step: int


class Packing(NamedTuple):
    """One step; its result starts `to` bytes into the part, or into the slot.

    Attributes:
        kind: what is done.
        part: 0 gate, 1 up, 2 down, in messages and as the place that `to` counts from.
        in_slot: whether `to` counts from the start of the slot instead.
        to: where the result starts.
        rows: of the result, N.
        columns: of the result, K.
        items: codes or floats.
        scales: of the codes, where they have any.
        block: rows and columns of the result that share a scale (FLOATS: an item).
        bits: of a code of the result.
        group: weights along K that share a scale in the result.
        zero: a byte of two codes that stand for 0.
        panel_stride: bytes from panel to panel of the result.
        importance: the piece of float32 `[K]` that weighs what rounding misses; -1 for none.
    """

    kind: PackKind
    part: int
    in_slot: bool
    to: int
    rows: int
    columns: int
    items: Items
    scales: Items | None = None
    block: Shape = (1, 1)
    bits: int = 0
    group: int = 0
    zero: int = 0
    panel_stride: int = 0
    importance: int = -1

    def row(self) -> tuple[int, ...]:
        """All fields as native code takes them."""
        scales = self.scales or Items(-1, 0, 0, 0, 0)
        head = (int(self.kind), self.part, int(self.in_slot), self.to, self.rows, self.columns)
        tail = (*self.block, self.bits, self.group, self.zero, self.panel_stride)
        return (*head, *self.items, *scales, *tail, self.importance)

    @property
    def out_nbytes(self) -> int:
        """Bytes from the first to the last of the result."""
        if self.kind == PackKind.FLOATS:
            return self.rows * self.columns * 4
        if self.kind == PackKind.MOVE:
            return self.rows * self.columns * item_nbytes(self.items.kind)
        if self.kind == PackKind.BLOCKS:
            panel = self._type.format.panel_nbytes(self.columns)
            return (-(-self.rows // PANEL_ROWS) - 1) * self.panel_stride + panel
        exact = self.scales if self.kind == PackKind.PANELS else None
        scale_nbytes = 2 if exact is None else item_nbytes(exact.kind)
        group_nbytes = PANEL_ROWS * (scale_nbytes + self.group * self.bits // 8)
        panels = -(-self.rows // PANEL_ROWS)
        return (panels - 1) * self.panel_stride + -(-self.columns // self.group) * group_nbytes

    def check(self, pieces: Sequence[Bytes], out: Bytes) -> None:
        """See that all that is read and written is there.

        Raises:
            ValueError: it is not; native code would go past the end.
        """
        if self.kind == PackKind.FLOATS:
            read = [(self.items, self._blocks())]
        elif self.kind == PackKind.PANELS:
            assert self.scales is not None
            groups = -(-self.columns // self.group)
            read = [
                (self.items, (self.rows, self.columns // 2)),
                (self.scales, (self.rows, groups)),
            ]
        elif self.kind == PackKind.BLOCKS:
            read = [(self.items, (self.rows, self.columns // self._type.block))]
        else:
            read = [(self.items, (self.rows, self.columns))]
            if self.scales is not None:
                read.append((self.scales, self._blocks()))
        for items, shape in read:
            end = _end(items, shape)
            if end > pieces[items.piece].size:
                raise ValueError(f"{items} end at {end} of {pieces[items.piece].size} bytes")
        if self.importance >= 0 and pieces[self.importance].size < 4 * self.columns:
            raise ValueError(f"importance is to have {self.columns} numbers")
        if self.out_nbytes > out.size:
            raise ValueError(f"the result takes {self.out_nbytes} bytes, not {out.size}")

    def _blocks(self) -> Shape:
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    def run(self, pieces: Sequence[Bytes], out: Bytes) -> bool:
        """Write the result to the start of `out`; False where a float or a scale is not finite."""
        match self.kind:
            case PackKind.MOVE:
                moved = np.ascontiguousarray(_view(self.items, pieces, self.rows, self.columns))
                _put(out, moved)
                return True
            case PackKind.FLOATS:
                return self._widen(pieces, out)
            case PackKind.PANELS:
                self._interleave(pieces, out)
                return True
            case PackKind.BLOCKS:
                self._interleave_blocks(pieces, out)
                return True
        return self._encode(pieces, out)

    def _widen(self, pieces: Sequence[Bytes], out: Bytes) -> bool:
        values = _floats(self.items, pieces, *self._blocks())
        _put(out, _repeated(values, self.block, (self.rows, self.columns)))
        return bool(np.isfinite(values).all())

    def _interleave(self, pieces: Sequence[Bytes], out: Bytes) -> None:
        assert self.scales is not None
        rows, columns = padded(self.rows, PANEL_ROWS), padded(self.columns, self.group)
        codes = np.full((rows, columns // 2), self.zero, np.uint8)
        codes[: self.rows, : self.columns // 2] = _view(
            self.items, pieces, self.rows, self.columns // 2
        )
        groups, width = columns // self.group, item_nbytes(self.scales.kind)
        scales = np.zeros((rows, groups), _DTYPES[self.scales.kind])
        scales[: self.rows] = _view(self.scales, pieces, self.rows, groups)
        panels = rows // PANEL_ROWS
        by_group = np.ascontiguousarray(scales.reshape(panels, PANEL_ROWS, -1).transpose(0, 2, 1))
        heads = by_group.reshape(panels, -1).view(np.uint8).reshape(panels, groups * 8 * width)
        chunks = interleave(codes, 4).reshape(panels, -1)
        self._put_panels(out, np.concatenate([heads, chunks], axis=1))

    @property
    def _type(self) -> BlockType:
        return BY_NUMBER[self.items.kind - ITEM_BLOCK]

    def _interleave_blocks(self, pieces: Sequence[Bytes], out: Bytes) -> None:
        kind, items = self._type, self.items
        rows = np.lib.stride_tricks.as_strided(
            pieces[items.piece][items.start :],
            (self.rows, kind.row_nbytes(self.columns)),
            (items.row_step, 1),
        )
        packed = kind.resident(rows, (self.rows, self.columns))
        self._put_panels(out, packed.reshape(-(-self.rows // PANEL_ROWS), -1))

    def _encode(self, pieces: Sequence[Bytes], out: Bytes) -> bool:
        weights = _floats(self.items, pieces, self.rows, self.columns)
        if self.scales is not None:
            wide = _floats(self.scales, pieces, *self._blocks())
            with np.errstate(over="ignore", invalid="ignore"):
                weights = weights * _repeated(wide, self.block, (self.rows, self.columns))
        fmt = IntegerFormat(self.bits, self.group, -1)
        if not fmt.can_encode(weights).all():
            return False
        importance = None
        if self.importance >= 0:
            importance = pieces[self.importance][: 4 * self.columns].view(np.float32)
        packed = fmt.pack(fmt.encode(weights, importance), (self.rows, self.columns))
        self._put_panels(out, packed.reshape(-(-self.rows // PANEL_ROWS), -1))
        return True

    def _put_panels(self, out: Bytes, panels: Bytes) -> None:
        for number, panel in enumerate(panels):
            _put(out[number * self.panel_stride :], panel)


def _put(out: Bytes, values: NDArray[np.generic]) -> None:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    out[: data.size] = data


def _view(items: Items, pieces: Sequence[Bytes], rows: int, columns: int) -> NDArray[np.generic]:
    """The items as they lie there; of nibbles, the bytes."""
    dtype = _DTYPES[items.kind]
    raw = np.lib.stride_tricks.as_strided(
        pieces[items.piece][items.start :],
        (rows, columns, dtype.itemsize),
        (items.row_step, _column_step(items), 1),
    )
    return np.ascontiguousarray(raw).view(dtype)[..., 0]


def _column_step(items: Items) -> int:
    return 1 if items.kind == ITEM_NIBBLE else items.column_step


def _end(items: Items, shape: Shape) -> int:
    """The byte behind the last item; of nibbles, `shape` counts bytes."""
    last = (shape[0] - 1) * items.row_step + (shape[1] - 1) * _column_step(items)
    return items.start + last + item_nbytes(items.kind)


def _floats(items: Items, pieces: Sequence[Bytes], rows: int, columns: int) -> Floats:
    raw = _view(items, pieces, rows, columns)
    match items.kind:
        case 2:  # ITEM_BF16
            return BF16.to_float32(raw)
        case 3:  # ITEM_E8M0
            return power_of_two(raw.view(np.uint8))
        case 4:  # ITEM_E4M3
            return np.asarray(E4M3[raw.view(np.uint8)])
    return raw.astype(np.float32)


def _repeated(values: Floats, block: Shape, shape: Shape) -> Floats:
    """Each value for a block of `[rows, columns]`; the last blocks may be short."""
    wide = np.repeat(np.repeat(values, block[0], axis=0), block[1], axis=1)
    return np.asarray(wide[: shape[0], : shape[1]])
