"""Codes of 8 bits with a float32 scale and a float32 minimum for each group of weights along K.

Block types of GGUF files that have no kernels of their own become this without a change of their
numbers: value = scale * code + minimum, where the product is exact (scales have at most 16
significant bits) and the sum rounds once. Stored: codes row by row, then scales `[N, K/G]`, then
minima. Resident, eight rows together: `[K/G] x 8` scales, `[K/G] x 8` minima, then chunks of codes
as in `formats.panels`. Rows are padded to 8 and K to 32 with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NumericsError
from colibri.formats.base import PANEL_ROWS, SCAN_F32, Bytes, Floats, Format, Scan, Shape, padded
from colibri.formats.panels import deinterleave, from_lanes, interleave, to_lanes

_COLUMNS = 32
_FLOAT = np.dtype("<f4")


class AffineFormat(Format):
    """`int8-g{group}-affine`."""

    bits = 8

    def __init__(self, group: int, code: int) -> None:
        """`group` is 16 or 32; `code` the number in the native ABI."""
        self.name, self.group, self.code = f"int8-g{group}-affine", group, code

    def nbytes(self, shape: Shape) -> int:
        """Codes, scales and minima of the padded matrix."""
        rows, columns = self._padded(shape)
        return rows * (columns + columns // self.group * 8)

    def resident_nbytes(self, shape: Shape) -> int:
        """The same bytes in another order."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Scales, minima and codes of eight rows."""
        return self.nbytes((PANEL_ROWS, columns))

    def encode(self, weights: Floats) -> Bytes:
        """From the least to the largest weight of each group, then to nearest.

        Raises:
            NumericsError: a weight is not finite.
        """
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
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        scales = _short(high / 255 - low / 255)
        minima = low + 128 * scales
        out = np.zeros_like(groups)
        np.divide(groups - minima[..., None], scales[..., None], out, where=scales[..., None] != 0)
        codes = np.rint(out).clip(-128, 127).astype(np.int8)
        return self.join(codes.reshape(rows, columns), scales, minima)

    def join(self, codes: NDArray[np.int8], scales: Floats, minima: Floats) -> Bytes:
        """Stored bytes of codes `[N', K']`, scales and minima `[N', K'/G]`, padded."""
        floats = np.concatenate([scales.reshape(-1), minima.reshape(-1)]).astype(_FLOAT)
        return np.concatenate([codes.reshape(-1).view(np.uint8), floats.view(np.uint8)])

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Interleave eight rows; no number changes."""
        rows, columns = self._padded(shape)
        panels, size = rows // PANEL_ROWS, rows * columns
        scales, minima = stored[size:].view(_FLOAT).reshape(2, rows, -1)
        chunks = interleave(stored[:size].reshape(rows, columns), 8).reshape(panels, -1)
        return np.concatenate([to_lanes(scales), to_lanes(minima), chunks], axis=1).reshape(-1)

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Scale * code, which is exact, + minimum."""
        rows, columns = self._padded(shape)
        panels = resident[: self.resident_nbytes(shape)].reshape(rows // PANEL_ROWS, -1)
        count = columns // self.group
        (scales, minima), rest = from_lanes(panels, ((count, _FLOAT), (count, _FLOAT)))
        codes = deinterleave(rest, 8).view(np.int8).reshape(rows, count, self.group)
        with np.errstate(over="ignore", invalid="ignore"):
            values = scales[..., None] * codes.astype(np.float32) + minima[..., None]
        return np.ascontiguousarray(values.reshape(rows, columns)[: shape[0], : shape[1]])

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """Scales and minima at the head of each panel."""
        rows, columns = self._padded(shape)
        nbytes = columns // self.group * PANEL_ROWS * 8
        return [Scan(0, nbytes, panel_stride, rows // PANEL_ROWS, SCAN_F32)]

    def _padded(self, shape: Shape) -> Shape:
        return padded(shape[0], PANEL_ROWS), padded(shape[1], _COLUMNS)


def _short(values: Floats) -> Floats:
    """Rounded up to 16 significant bits, so that products with codes are exact."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 255) & np.uint32(0xFFFFFF00)).view(np.float32)


AFFINE_G32, AFFINE_G16 = AffineFormat(32, 144), AffineFormat(16, 208)
