"""Symmetric integer formats with one scale of 16 bits for each group of weights along K.

Scales are float16, or bfloat16 where the name ends in `-bf16`: such scales come out of published
checkpoints, and some are below what float16 holds exactly.
Stored: codes row by row, then scales `[N, K/G]`. int4 codes are kept as code + 8, two to a
    byte, the even k in the low nibble. Resident, eight rows (a panel) together: `[K/G] x 8` scales,
    then chunks of 32 bytes in which lane r holds four bytes of row r: for int4 the low nibbles are
    w[8c..8c+3] and the high ones w[8c+4..8c+7]; for int8 they are w[4c..4c+3]. A kernel thus meets
    eight rows in one vector and never sums across lanes. Rows are padded to 8 and K to the group
    with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NumericsError
from colibri.formats.base import PANEL_ROWS, Bytes, Floats, Format, Scan, Shape, padded
from colibri.formats.float import F16, SCANS, FloatFormat
from colibri.formats.panels import deinterleave, interleave, pair_nibbles

_SCALE_BYTES = 2
_LARGEST_SCALE = 65504.0  # the largest finite float16


class IntegerFormat(Format):
    """`int{bits}-g{group}`: value = code * scale, code in [-2^(bits-1), 2^(bits-1) - 1].

    Attributes:
        bits: of a code.
        scale: the format of scales, f16 or bf16.
    """

    def __init__(self, bits: int, group: int, code: int, scale: FloatFormat = F16) -> None:
        """`bits` is 4 or 8; `group` a multiple of 32."""
        self.bits, self.group, self.code, self.scale = bits, group, code, scale
        self.name = f"int{bits}-g{group}" + ("" if scale is F16 else f"-{scale.name}")

    def nbytes(self, shape: Shape) -> int:
        """Codes and scales of the padded matrix."""
        rows, columns = self._padded(shape)
        return rows * (columns * self.bits // 8 + columns // self.group * _SCALE_BYTES)

    def resident_nbytes(self, shape: Shape) -> int:
        """The same bytes in another order."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Scales and codes of eight rows."""
        return self.nbytes((PANEL_ROWS, columns))

    def encode(self, weights: Floats, importance: Floats | None = None) -> Bytes:
        """Pick each group's scale by least squared error, then round to nearest.

        `importance [K]` weighs the squares, column by column: the mean square of the inputs that
        columns meet makes it the error of the product. Scales are then looked for longer.
        """
        encodable = self.can_encode(weights)
        if not encodable.all():
            row, column = np.argwhere(~encodable)[0]
            raise NumericsError(
                f"weight [{row}, {column}] is {weights[row, column]}; "
                f"{self.name} has no code for it: fetch the source file again"
            )
        rows, columns = self._padded(weights.shape)
        full = np.zeros((rows, columns), np.float32)
        full[: weights.shape[0], : weights.shape[1]] = weights
        groups = full.reshape(rows, columns // self.group, self.group)
        scales = self._best_scales(groups, self._by_group(importance, weights.shape[1]))
        codes = self._round(groups, self.scale.to_float32(scales)).reshape(rows, columns)
        return np.concatenate([self._store(codes).reshape(-1), scales.reshape(-1).view(np.uint8)])

    def can_encode(self, weights: Floats) -> NDArray[np.bool_]:
        """Which weights have a code: finite ones, up to the largest code and scale together."""
        return np.asarray(np.abs(weights) <= _LARGEST_SCALE * 2 ** (self.bits - 1))  # no NaN is

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Interleave eight rows; codes and scales are moved, never changed."""
        rows, columns = self._padded(shape)
        panels, code_bytes = rows // PANEL_ROWS, rows * columns * self.bits // 8
        scales = (
            stored[code_bytes:].view(np.uint16).reshape(panels, PANEL_ROWS, -1).transpose(0, 2, 1)
        )
        chunks = interleave(stored[:code_bytes].reshape(rows, -1), self.bits)
        parts = [
            np.ascontiguousarray(scales).reshape(panels, -1).view(np.uint8),
            chunks.reshape(panels, -1),
        ]
        return np.concatenate(parts, axis=1).reshape(-1)

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Code * scale; exact, since a code has at most 8 and a scale 11 significant bits."""
        codes, scales = self.split(resident, shape)
        rows, columns = codes.shape
        groups = codes.reshape(rows, -1, self.group).astype(np.float32) * scales[:, :, None]
        return np.ascontiguousarray(groups.reshape(rows, columns)[: shape[0], : shape[1]])

    def split(self, resident: Bytes, shape: Shape) -> tuple[NDArray[np.int8], Floats]:
        """Codes `[N', K']` int8 and scales `[N', K'/G]` float32 of the padded matrix."""
        rows, columns = self._padded(shape)
        panels, scale_bytes = rows // PANEL_ROWS, columns // self.group * PANEL_ROWS * _SCALE_BYTES
        by_panel = resident[: self.resident_nbytes(shape)].reshape(panels, -1)
        scales = (
            np.ascontiguousarray(by_panel[:, :scale_bytes])
            .view(self.scale.dtype)
            .reshape(panels, -1, PANEL_ROWS)
            .transpose(0, 2, 1)
        )
        codes = deinterleave(by_panel[:, scale_bytes:], self.bits)
        signed = codes.view(np.int8) - np.int8(8 if self.bits == 4 else 0)
        return signed.reshape(rows, columns), self.scale.to_float32(scales.reshape(rows, -1))

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """The scales at the head of each panel."""
        rows, columns = self._padded(shape)
        scales = columns // self.group * PANEL_ROWS * _SCALE_BYTES
        return [Scan(0, scales, panel_stride, rows // PANEL_ROWS, SCANS[self.scale.name])]

    def _padded(self, shape: tuple[int, ...]) -> Shape:
        return padded(shape[0], PANEL_ROWS), padded(shape[1], self.group)

    def _by_group(self, importance: Floats | None, columns: int) -> Floats | None:
        """`[K/G, G]`, zeros where the matrix is padded."""
        if importance is None:
            return None
        full = np.zeros(padded(columns, self.group), np.float32)
        full[:columns] = importance
        return full.reshape(-1, self.group)

    def _best_scales(self, groups: Floats, importance: Floats | None) -> NDArray[np.generic]:
        """Scales `[N, K/G]`: each candidate maps the largest weight to another code.

        The last one is the least-squares scale of the codes of the best so far,
        `sum w q x / sum w q q`.
        """
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        best: NDArray[np.generic] = np.zeros(extreme.shape, self.scale.dtype)
        least = np.full(extreme.shape, np.inf, np.float32)
        for divisor in self._divisors(importance is not None):
            tried = self._tried(groups, importance, extreme / np.float32(divisor))
            best, least = _better(best, least, *tried)
        codes = self._round(groups, self.scale.to_float32(best))
        above, below = (
            _sum(_weighed(codes * groups, importance)),
            _sum(_weighed(codes * codes, importance)),
        )
        fitted = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        return _better(best, least, *self._tried(groups, importance, fitted))[0]

    def _divisors(self, many: bool) -> list[float]:
        top = 2.0 ** (self.bits - 1)
        few = [-top, top - 1, -(top - 1), -(top - 0.5), top - 0.5, -(top + 0.5)]
        steps = [top * (0.75 + i / 32) for i in range(17)] if many else []
        return [*few, *(sign * step for step in steps for sign in (-1.0, 1.0))]

    def _tried(
        self, groups: Floats, importance: Floats | None, wanted: Floats
    ) -> tuple[NDArray[np.generic], Floats]:
        """The scales nearest to what is wanted, and the errors `[N, K/G]` that they leave."""
        scale = self.scale.from_float32(np.clip(wanted, -_LARGEST_SCALE, _LARGEST_SCALE))
        wide = self.scale.to_float32(scale)
        missed = self._round(groups, wide) * wide[..., None] - groups
        return scale, _sum(_weighed(np.square(missed), importance))

    def _round(self, groups: Floats, scales: Floats) -> Floats:
        top = 2 ** (self.bits - 1)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
        return np.clip(np.rint(groups * inverse[..., None]), -top, top - 1)

    def _store(self, codes: Floats) -> Bytes:
        if self.bits == 8:
            return np.asarray(codes.astype(np.int8).view(np.uint8))
        return pair_nibbles((codes + 8).astype(np.uint8))


def _weighed(squares: Floats, importance: Floats | None) -> Floats:
    return squares if importance is None else importance * squares


def _better(
    best: NDArray[np.generic], least: Floats, scale: NDArray[np.generic], error: Floats
) -> tuple[NDArray[np.generic], Floats]:
    """Of two candidates the one that leaves less."""
    better = error < least
    return np.where(better, scale, best), np.where(better, error, least)


INT8_G32, INT4_G32 = IntegerFormat(8, 32, 16), IntegerFormat(4, 32, 32)


def _sum(items: Floats) -> Floats:
    """Sums over the last axis, in the order of native/pack.c: eight, then a tree of them."""
    by_eight = items.reshape(*items.shape[:-1], -1, 8)
    sums = by_eight[..., 0, :]
    for i in range(1, by_eight.shape[-2]):
        sums = sums + by_eight[..., i, :]
    pairs = sums[..., 0::2] + sums[..., 1::2]
    return np.asarray((pairs[..., 0] + pairs[..., 1]) + (pairs[..., 2] + pairs[..., 3]))
