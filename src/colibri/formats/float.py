"""The plain float formats: row-major, resident as they are stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.formats.base import (
    PANEL_ROWS,
    SCAN_BF16,
    SCAN_F16,
    SCAN_F32,
    Bytes,
    Floats,
    Scan,
    Shape,
)
from colibri.formats.row_major import RowMajorFormat

SCANS = {"f32": SCAN_F32, "f16": SCAN_F16, "bf16": SCAN_BF16}


class FloatFormat(RowMajorFormat):
    """A row-major matrix of IEEE floats."""

    def __init__(self, name: str, code: int, dtype: str) -> None:
        """`dtype` is the NumPy storage type; bfloat16 is stored as uint16."""
        self.name, self.code, self.dtype = name, code, np.dtype(dtype)

    def encode(self, weights: Floats) -> Bytes:
        """Round to nearest even."""
        return np.ascontiguousarray(self.from_float32(weights)).reshape(-1).view(np.uint8)

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """Widen; every value is exact in float32."""
        items = np.frombuffer(resident.tobytes(), self.dtype, count=shape[0] * shape[1])
        return self.to_float32(items).reshape(shape)

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """Every weight; one run unless panels alternate with another matrix's."""
        panel, kind = self.panel_nbytes(shape[1]), SCANS[self.name]
        if panel_stride == panel:
            return [Scan(0, self.nbytes(shape), 0, 1, kind)]
        panels, rest = divmod(shape[0], PANEL_ROWS)
        tail = self.nbytes((rest, shape[1]))
        return [
            Scan(0, panel, panel_stride, panels, kind),
            Scan(panels * panel_stride, tail, 0, 1, kind),
        ]

    def from_float32(self, values: Floats) -> NDArray[np.generic]:
        """float32 values to storage items, rounded to nearest even."""
        with np.errstate(over="ignore"):
            return values.astype(self.dtype)

    def to_float32(self, items: NDArray[np.generic]) -> Floats:
        """Storage items to float32 values of the same shape."""
        return items.astype(np.float32)


class BFloat16(FloatFormat):
    """bfloat16: the upper half of a float32, kept as uint16 because NumPy has no such type."""

    def __init__(self, code: int) -> None:
        """Stored as uint16."""
        super().__init__("bf16", code, "<u2")

    def from_float32(self, values: Floats) -> NDArray[np.generic]:
        """Round to nearest even; a NaN stays a NaN."""
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)

    def to_float32(self, items: NDArray[np.generic]) -> Floats:
        """Append sixteen zero bits."""
        return (items.astype(np.uint32) << 16).view(np.float32)


F32 = FloatFormat("f32", 0, "<f4")
F16 = FloatFormat("f16", 1, "<f2")
BF16 = BFloat16(2)
