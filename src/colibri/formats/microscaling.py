"""MXFP4: codes of four bits (E2M1) with a power of two (E8M0) for each 32 weights along K.

From the OCP Microscaling Formats specification 1.0. A code is a sign bit, two bits of exponent and
one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale byte e stands for 2^(e - 127); 255 is NaN.
Stored: codes row by row, two to a byte, the even k in the low nibble, then scales `[N, K/32]`.
Resident: panels of eight rows, `[K/32] x 8` scales, then chunks as in `formats.panels`. Rows are
padded to 8 and K to 32 with zero codes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NumericsError
from colibri.formats.base import PANEL_ROWS, SCAN_E8M0, Bytes, Floats, Format, Scan, Shape, padded
from colibri.formats.panels import deinterleave, interleave, pair_nibbles

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# Halfway between neighbours; a tie goes to the even code (mantissa bit 0).
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_BIAS, _LARGEST_EXPONENT, NAN_SCALE = 127, 254, 255


class MXFP4Format(Format):
    """`mxfp4`: value = E2M1 code * 2^(scale - 127)."""

    bits = 4

    def __init__(self, code: int) -> None:
        """`code` is the number in the native ABI."""
        self.name, self.group, self.code = "mxfp4", 32, code

    def nbytes(self, shape: Shape) -> int:
        """Codes and scales of the padded matrix."""
        rows, columns = self._padded(shape)
        return rows * (columns // 2 + columns // self.group)

    def resident_nbytes(self, shape: Shape) -> int:
        """The same bytes in another order."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Scales and codes of eight rows."""
        return self.nbytes((PANEL_ROWS, columns))

    def encode(self, weights: Floats) -> Bytes:
        """Of two exponents the one of least squared error, then round to nearest even."""
        if not np.isfinite(weights).all():
            row, column = np.argwhere(~np.isfinite(weights))[0]
            raise NumericsError(
                f"weight [{row}, {column}] is {weights[row, column]}; "
                f"{self.name} has no code for it: fetch the source file again"
            )
        rows, columns = self._padded((weights.shape[0], weights.shape[1]))
        full = np.zeros((rows, columns), np.float32)
        full[: weights.shape[0], : weights.shape[1]] = weights
        groups = full.reshape(rows, -1, self.group)
        exponents = _best_exponents(groups)
        codes = _round(_scaled(groups, exponents)).reshape(rows, columns)
        return np.concatenate([pair_nibbles(codes).reshape(-1), exponents.reshape(-1)])

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Interleave eight rows; codes and scales are moved, never changed."""
        rows, columns = self._padded(shape)
        panels, code_bytes = rows // PANEL_ROWS, rows * columns // 2
        scales = stored[code_bytes:].reshape(panels, PANEL_ROWS, -1).transpose(0, 2, 1)
        chunks = interleave(stored[:code_bytes].reshape(rows, -1), self.bits)
        parts = [scales.reshape(panels, -1), chunks.reshape(panels, -1)]
        return np.concatenate(parts, axis=1).reshape(-1)

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Code * scale, exact; a scale of 255 is NaN."""
        codes, scales = self.split(resident, shape)
        rows, columns = codes.shape
        with np.errstate(over="ignore"):
            groups = E2M1[codes].reshape(rows, -1, self.group) * power_of_two(scales)[..., None]
        return np.ascontiguousarray(groups.reshape(rows, columns)[: shape[0], : shape[1]])

    def split(self, resident: Bytes, shape: Shape) -> tuple[Bytes, Bytes]:
        """Codes `[N', K']` below 16 and scale bytes `[N', K'/32]` of the padded matrix."""
        rows, columns = self._padded(shape)
        panels, scale_bytes = rows // PANEL_ROWS, columns // self.group * PANEL_ROWS
        by_panel = resident[: self.resident_nbytes(shape)].reshape(panels, -1)
        scales = by_panel[:, :scale_bytes].reshape(panels, -1, PANEL_ROWS).transpose(0, 2, 1)
        codes = deinterleave(by_panel[:, scale_bytes:], self.bits)
        return codes.reshape(rows, columns), np.ascontiguousarray(scales).reshape(rows, -1)

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """The scales at the head of each panel."""
        rows, columns = self._padded(shape)
        scales = columns // self.group * PANEL_ROWS
        return [Scan(0, scales, panel_stride, rows // PANEL_ROWS, SCAN_E8M0)]

    def _padded(self, shape: Shape) -> Shape:
        return padded(shape[0], PANEL_ROWS), padded(shape[1], self.group)


def power_of_two(exponents: Bytes) -> Floats:
    """2^(e - 127) of E8M0 bytes; 255 is NaN."""
    with np.errstate(over="ignore"):
        values = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS).astype(np.float32)
    return np.where(exponents == NAN_SCALE, np.float32(np.nan), values)


def _scaled(groups: Floats, exponents: NDArray[np.uint8]) -> Floats:
    return np.ldexp(groups, _BIAS - exponents.astype(np.int32)[..., None])


def _round(values: Floats) -> Bytes:
    """Codes of values, the magnitude at most 6."""
    size = np.abs(values)
    code = np.searchsorted(_MIDDLES, size, side="left")
    tie = (code < len(_MIDDLES)) & (size == _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code).astype(np.uint8)
    signs = (np.signbit(values) & (code > 0)).astype(np.uint8) << 3
    return np.asarray(code | signs, np.uint8)


def _best_exponents(groups: Floats) -> NDArray[np.uint8]:
    """E8M0 bytes `[N, K/32]`: the largest weight becomes 4 to 8, or 2 to 4."""
    largest = np.frexp(np.abs(groups).max(axis=-1))[1]  # |w| < 2^largest
    best = np.zeros(largest.shape, np.uint8)
    least = np.full(largest.shape, np.inf, np.float32)
    for down in (3, 2):
        exponents = np.clip(largest - down + _BIAS, 0, _LARGEST_EXPONENT).astype(np.uint8)
        values = _scaled(groups, exponents)
        error = np.square(E2M1[_round(values)] - values).sum(-1, dtype=np.float32)
        with np.errstate(over="ignore"):
            error = np.ldexp(error, 2 * (exponents.astype(np.int32) - exponents.max(initial=0)))
        better = error < least
        best, least = np.where(better, exponents, best), np.where(better, error, least)
    return np.where(np.abs(groups).max(axis=-1) == 0, np.uint8(0), best)


MXFP4 = MXFP4Format(48)
