"""8-bit rows with one float32 scale each: how keys and values are kept when asked to be small.

A matrix `[N, K]` is its codes `[N, K]` int8, then its scales `[N]` float32. In the K/V pool a row
is one head at one position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.formats.base import PANEL_ROWS, Bytes, Floats, Format, Scan, Shape

_LARGEST = np.float32(127)
_SMALLEST = np.float32(1e-30)


class RowInt8Format(Format):
    """`int8` of the setting `kv`: value = code * scale, code = rint(x * (127 / max |x|))."""

    def __init__(self, code: int) -> None:
        """`code` is the number in the native ABI."""
        self.name, self.code = "int8", code

    def nbytes(self, shape: Shape) -> int:
        """Codes and scales."""
        return shape[0] * (shape[1] + 4)

    def resident_nbytes(self, shape: Shape) -> int:
        """Same as stored."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Eight rows and their scales."""
        return self.nbytes((PANEL_ROWS, columns))

    def encode(self, weights: Floats) -> Bytes:
        """Codes, then scales; a row that is not finite gets a NaN for its scale."""
        codes, scales = self.round(weights)
        return np.concatenate([codes.reshape(-1).view(np.uint8), scales.view(np.uint8)])

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """The bytes themselves."""
        return stored

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Code * scale."""
        size = shape[0] * shape[1]
        codes = resident[:size].view(np.int8).reshape(shape).astype(np.float32)
        scales = np.frombuffer(resident[size : size + 4 * shape[0]].tobytes(), "<f4")
        return np.asarray(codes * scales[:, None])

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """None: such rows are written by kernels and never read from a file."""
        return []

    def round(self, rows: Floats) -> tuple[NDArray[np.int8], Floats]:
        """Codes `[..., K]` and scales `[...]` of rows along the last axis."""
        largest = np.abs(rows).max(axis=-1, initial=0)
        finite = np.isfinite(largest)
        usable = finite & (largest > _SMALLEST)
        factor = np.divide(_LARGEST, largest, out=np.zeros_like(largest), where=usable)
        codes = np.rint(np.where(usable[..., None], rows, 0) * factor[..., None]).astype(np.int8)
        scales = np.where(usable, largest, np.float32(0)) / _LARGEST
        return codes, np.where(finite, scales, np.float32(np.nan)).astype(np.float32)


INT8_ROWS = RowInt8Format(3)
