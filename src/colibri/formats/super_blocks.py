"""`q4_k` and `q6_k` of GGUF files: blocks of 256 weights along K, scaled on two levels.

Stored: ggml's own blocks row by row (`formats.super_block_bytes`). Resident, eight rows together:
the float16 scales of blocks, `[K/256] x 8` each (q4_k: `d`, then `dmin`), then the small integers
that multiply them, a byte each, `[K/32] x 8` (q4_k: scales, then minima) or `[K/16] x 8` (q6_k),
then codes in chunks of 32 bytes as in `formats.panels`. The upper bits of q6_k follow the two
chunks of 16 columns that they belong to: lane r holds in byte i, from the low bits on, those of
columns i, i + 4, i + 8 and i + 12.

Files of these types are never padded; matrices coded here are, rows to 8 and K to 256, where inputs
are zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NumericsError
from colibri.formats import super_block_bytes as raw
from colibri.formats.base import PANEL_ROWS, SCAN_F16, Bytes, Floats, Format, Scan, Shape, padded
from colibri.formats.panels import (
    deinterleave,
    from_lanes,
    interleave,
    pair_nibbles,
    to_lanes,
)

SUPER = 256
_LARGEST_SCALE = 65504.0  # the largest finite float16
_HALF, _BYTE = np.dtype("<f2"), np.dtype("u1")


class SuperBlockFormat(Format):
    """What both have in common.

    Attributes:
        block_nbytes: bytes of 256 weights as stored.
    """

    block_nbytes: int
    num_halves: int  # float16 scales of a block
    head_nbytes: int  # resident bytes of a block's scales, of one row
    code_nbytes: int  # of its codes

    def nbytes(self, shape: Shape) -> int:
        """Blocks of the padded matrix."""
        rows, columns = self._padded(shape)
        return rows * (columns // SUPER) * self.block_nbytes

    def resident_nbytes(self, shape: Shape) -> int:
        """The small scales of q4_k take a byte each, so that they are more than stored."""
        return padded(shape[0], PANEL_ROWS) // PANEL_ROWS * self.panel_nbytes(shape[1])

    def panel_nbytes(self, columns: int) -> int:
        """Scales and codes of eight rows."""
        blocks = padded(columns, SUPER) // SUPER
        return PANEL_ROWS * blocks * (self.head_nbytes + self.code_nbytes)

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """The float16 scales at the head of each panel."""
        rows, columns = self._padded(shape)
        nbytes = columns // SUPER * PANEL_ROWS * 2 * self.num_halves
        return [Scan(0, nbytes, panel_stride, rows // PANEL_ROWS, SCAN_F16)]

    def _padded(self, shape: Shape) -> Shape:
        return padded(shape[0], PANEL_ROWS), padded(shape[1], SUPER)

    def _blocks(self, weights: Floats, group: int) -> Floats:
        """Weights in groups `[N, B, 256 / group, group]`, padded.

        Raises:
            NumericsError: one is not finite or too large.
        """
        encodable = np.abs(weights) <= _LARGEST_SCALE  # no NaN is
        if not encodable.all():
            row, column = np.argwhere(~encodable)[0]
            raise NumericsError(
                f"weight [{row}, {column}] is {weights[row, column]}; "
                f"{self.name} has no code for it: fetch the source file again"
            )
        rows, columns = self._padded((weights.shape[0], weights.shape[1]))
        full = np.zeros((rows, columns), np.float32)
        full[: weights.shape[0], : weights.shape[1]] = weights
        return full.reshape(rows, columns // SUPER, SUPER // group, group)

    def _panels(self, resident: Bytes, shape: Shape) -> Bytes:
        panels = padded(shape[0], PANEL_ROWS) // PANEL_ROWS
        return resident[: self.resident_nbytes(shape)].reshape(panels, -1)

    def _joined(self, panels: int, parts: list[Bytes]) -> Bytes:
        return np.concatenate([part.reshape(panels, -1) for part in parts], axis=1).reshape(-1)


class Q4KFormat(SuperBlockFormat):
    """`q4_k`: value = d * scale * code - dmin * minimum; codes 0 to 15, the rest 0 to 63."""

    bits, num_halves, head_nbytes, code_nbytes, block_nbytes = 4, 2, 20, 128, 144

    def __init__(self, code: int) -> None:
        """`code` is the number in the native ABI."""
        self.name, self.group, self.code = "q4_k", 32, code

    def encode(self, weights: Floats) -> Bytes:
        """From the least to the largest weight of each group, zero among them; then to nearest."""
        groups = self._blocks(weights, 32)
        lowest = np.minimum(groups.min(axis=-1), 0)
        scales, minima = (groups.max(axis=-1).clip(0) - lowest) / np.float32(15), -lowest
        d, scales = _two_levels(scales, 63)
        dmin, minima = _two_levels(minima, 63)
        wide, offset = (d * scales)[..., None], (dmin * minima)[..., None]
        codes = np.rint(_divided(groups + offset, wide)).clip(0, 15)
        fields = raw.Q4K(_halves(d), _halves(dmin), *_bytes(scales, minima, codes))
        return raw.join_q4_k(fields).reshape(-1)

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Interleave eight rows; no number changes."""
        rows, columns = self._padded(shape)
        fields = raw.split_q4_k(stored.reshape(rows, columns // SUPER, -1))
        heads = [to_lanes(part.reshape(rows, -1)) for part in fields[:4]]
        codes = interleave(pair_nibbles(fields.codes.reshape(rows, columns)), 4)
        return self._joined(rows // PANEL_ROWS, [*heads, codes])

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """The difference is rounded once; both products are exact."""
        columns, panels = self._padded(shape)[1], self._panels(resident, shape)
        blocks = columns // SUPER
        counts = ((blocks, _HALF), (blocks, _HALF), (8 * blocks, _BYTE), (8 * blocks, _BYTE))
        (d, dmin, scales, minima), rest = from_lanes(panels, counts)
        codes = deinterleave(rest, 4).reshape(len(d), blocks, 8, 32).astype(np.float32)
        wide = _levels(d, scales, blocks)[..., None] * codes
        values = wide - _levels(dmin, minima, blocks)[..., None]
        return np.ascontiguousarray(values.reshape(len(d), columns)[: shape[0], : shape[1]])


class Q6KFormat(SuperBlockFormat):
    """`q6_k`: value = d * scale * (code - 32); codes 0 to 63, scales of 16 weights -128 to 127."""

    bits, num_halves, head_nbytes, code_nbytes, block_nbytes = 6, 1, 18, 192, 210

    def __init__(self, code: int) -> None:
        """`code` is the number in the native ABI."""
        self.name, self.group, self.code = "q6_k", 16, code

    def encode(self, weights: Floats) -> Bytes:
        """The largest weight of a group of 16 becomes -32; then to nearest."""
        groups = self._blocks(weights, 16)
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        d, scales = _two_levels(extreme / np.float32(-32), 127)
        codes = np.rint(_divided(groups, (d * scales)[..., None])).clip(-32, 31) + 32
        small = np.ascontiguousarray(scales.astype(np.int8)).view(np.uint8)
        fields = raw.Q6K(_halves(d), small, *_bytes(codes))
        return raw.join_q6_k(fields).reshape(-1)

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Interleave eight rows; no number changes."""
        rows, columns = self._padded(shape)
        fields = raw.split_q6_k(stored.reshape(rows, columns // SUPER, -1))
        heads = [to_lanes(part.reshape(rows, -1)) for part in fields[:2]]
        codes = fields.codes.reshape(rows, columns)
        low = interleave(pair_nibbles(np.asarray(codes & 15, np.uint8)), 4)  # [N/8, K/8, 8, 4]
        by_four = (codes >> 4).reshape(rows, -1, 4, 4)
        high = by_four[:, :, 0] | by_four[:, :, 1] << 2 | by_four[:, :, 2] << 4
        high |= by_four[:, :, 3] << 6
        upper = interleave(np.ascontiguousarray(high).reshape(rows, -1), 8)  # [N/8, K/16, 8, 4]
        pairs = low.reshape(len(low), -1, 2, 32)
        both = np.concatenate([pairs, upper.reshape(len(low), -1, 1, 32)], axis=2)
        return self._joined(rows // PANEL_ROWS, [*heads, both])

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Exact: a code has 6, the scales 11 and 8 significant bits."""
        columns, panels = self._padded(shape)[1], self._panels(resident, shape)
        blocks = columns // SUPER
        (d, scales), rest = from_lanes(panels, ((blocks, _HALF), (16 * blocks, np.dtype("i1"))))
        triples = rest.reshape(len(rest), -1, 3, 32)
        low = deinterleave(np.ascontiguousarray(triples[:, :, :2]).reshape(len(rest), -1), 4)
        high = deinterleave(np.ascontiguousarray(triples[:, :, 2]).reshape(len(rest), -1), 8)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        upper = high.reshape(*high.shape[:2], -1, 1, 4) >> shifts & 3
        codes = low.reshape(len(d), columns) | upper.reshape(len(d), columns) << 4
        signed = (codes.astype(np.float32) - 32).reshape(len(d), blocks, 16, 16)
        values = _levels(d, scales, blocks)[..., None] * signed
        return np.ascontiguousarray(values.reshape(len(d), columns)[: shape[0], : shape[1]])


def _levels(d: NDArray[np.generic], small: NDArray[np.generic], blocks: int) -> Floats:
    """Scales of groups `[N, B, groups]`, exact."""
    wide = small.reshape(len(d), blocks, -1).astype(np.float32)
    return np.asarray(d.astype(np.float32)[..., None] * wide)


def _two_levels(scales: Floats, most: int) -> tuple[Floats, Floats]:
    """`d [N, B, 1]` as a float16 holds it, and whole numbers up to `most` that multiply it."""
    d = (np.abs(scales).max(axis=-1, keepdims=True) / np.float32(most)).astype(np.float16)
    wide = d.astype(np.float32)
    return wide, np.rint(_divided(scales, wide)).clip(-most, most)


def _divided(values: Floats, by: Floats) -> Floats:
    """`values / by`, 0 where `by` is."""
    out = np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32)
    return np.divide(values, by, out=out, where=by != 0)


def _halves(d: Floats) -> NDArray[np.uint16]:
    return np.ascontiguousarray(d[..., 0].astype("<f2")).view(np.uint16)


def _bytes(*parts: Floats) -> list[Bytes]:
    return [part.astype(np.uint8) for part in parts]


Q4_K, Q6_K = Q4KFormat(160), Q6KFormat(176)
