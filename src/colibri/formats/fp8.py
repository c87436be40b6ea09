"""E4M3 bytes with a scale for each square block of weights.

A code is a sign bit, four bits of exponent (bias 7) and three of mantissa; 0x7f and 0xff are NaN
and there is no infinity (OCP 8-bit floating point specification 1.0). Value = code * scale of its
block; the last blocks of a row or column may be short. Stored and resident alike: codes `[N, K]`
row by row, zeros up to a multiple of four bytes, then scales `[N / B, K / B]` float32. Checkpoints
keep scales as float32, bfloat16 or E8M0; all are exact in float32.
"""

from __future__ import annotations

import numpy as np

from colibri.errors import NumericsError
from colibri.formats.base import (
    PANEL_ROWS,
    SCAN_E4M3,
    SCAN_F32,
    Bytes,
    Floats,
    Format,
    Scan,
    Shape,
    padded,
)

LARGEST = 448.0
_NAN = 0x7F


class FP8Format(Format):
    """`fp8-e4m3-b{block}`: row-major, never padded by rows or columns."""

    def __init__(self, block: int, code: int) -> None:
        """`block` is the side of the blocks that share a scale, a multiple of 16."""
        self.name, self.block, self.code = f"fp8-e4m3-b{block}", block, code

    def nbytes(self, shape: Shape) -> int:
        """Codes and scales."""
        rows, columns = self._blocks(shape)
        return self.scales_at(shape) + 4 * rows * columns

    def resident_nbytes(self, shape: Shape) -> int:
        """Same as stored."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Codes of eight rows; the scales come behind all codes."""
        return PANEL_ROWS * columns

    def encode(self, weights: Floats) -> Bytes:
        """Scale = largest magnitude of the block / 448, then round to nearest even."""
        if not np.isfinite(weights).all():
            row, column = np.argwhere(~np.isfinite(weights))[0]
            raise NumericsError(
                f"weight [{row}, {column}] is {weights[row, column]}; "
                f"{self.name} has no code for it: fetch the source file again"
            )
        shape = (weights.shape[0], weights.shape[1])
        scales = self._largest(np.abs(weights)) / np.float32(LARGEST)
        wide = self._spread(scales, shape)
        scaled = np.divide(weights, wide, out=np.zeros_like(weights), where=wide != 0)
        return self.join(round_e4m3(np.clip(scaled, -LARGEST, LARGEST)), scales)

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Bytes of a checkpoint's codes `[N, K]` and float32 scales `[N / B, K / B]`."""
        shape = (codes.shape[0], codes.shape[1])
        out = np.zeros(self.nbytes(shape), np.uint8)
        out[: codes.size] = codes.reshape(-1)
        out[self.scales_at(shape) :] = (
            np.ascontiguousarray(scales, "<f4").reshape(-1).view(np.uint8)
        )
        return out

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """The bytes themselves."""
        return stored

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Code * scale, rounded to float32 where the scale has more than 20 bits."""
        codes, scales = self.split(resident, shape)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(E4M3[codes] * self._spread(scales, shape))

    def split(self, resident: Bytes, shape: Shape) -> tuple[Bytes, Floats]:
        """Codes `[N, K]` and scales `[N / B, K / B]`."""
        start, end = self.scales_at(shape), self.nbytes(shape)
        codes = resident[: shape[0] * shape[1]].reshape(shape)
        scales = np.frombuffer(resident[start:end].tobytes(), "<f4").reshape(self._blocks(shape))
        return codes, scales.astype(np.float32)

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """All codes, then all scales; panels never alternate with another matrix's."""
        scales = self.scales_at(shape)
        return [
            Scan(0, shape[0] * shape[1], 0, 1, SCAN_E4M3),
            Scan(scales, self.nbytes(shape) - scales, 0, 1, SCAN_F32),
        ]

    def _blocks(self, shape: Shape) -> Shape:
        return -(-shape[0] // self.block), -(-shape[1] // self.block)

    def scales_at(self, shape: Shape) -> int:
        """Where the scales follow the codes."""
        return padded(shape[0] * shape[1], 4)

    def _spread(self, scales: Floats, shape: Shape) -> Floats:
        """Scales of every weight `[N, K]`."""
        wide = np.repeat(np.repeat(scales, self.block, axis=0), self.block, axis=1)
        return np.asarray(wide[: shape[0], : shape[1]])

    def _largest(self, sizes: Floats) -> Floats:
        rows, columns = self._blocks((sizes.shape[0], sizes.shape[1]))
        full = np.zeros((rows * self.block, columns * self.block), np.float32)
        full[: sizes.shape[0], : sizes.shape[1]] = sizes
        blocks = full.reshape(rows, self.block, columns, self.block)
        return np.asarray(blocks.max(axis=(1, 3)))


def _values() -> Floats:
    """The numbers of all 256 codes."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal).astype(np.float32)
    size[_NAN] = np.nan
    return np.concatenate([size, -size])


E4M3 = _values()
_MIDDLES = (E4M3[1:_NAN] + E4M3[: _NAN - 1]) / 2


def round_e4m3(values: Floats) -> Bytes:
    """Codes of finite values within +-448, to nearest even."""
    size = np.abs(values)
    code = np.searchsorted(_MIDDLES, size, side="left")
    tie = (code < len(_MIDDLES)) & (size == _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code).astype(np.uint8)
    signs = np.signbit(values).astype(np.uint8) << 7
    return np.asarray(code | signs, np.uint8)


FP8_B128, FP8_B64 = FP8Format(128, 4), FP8Format(64, 6)
FP8_B32, FP8_B16 = FP8Format(32, 5), FP8Format(16, 7)
