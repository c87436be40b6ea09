"""Whole numbers, as checkpoints store tables of ids; no kernel reads them."""

from __future__ import annotations

import numpy as np

from colibri.errors import NumericsError
from colibri.formats.base import Bytes, Floats, Scan, Shape
from colibri.formats.row_major import RowMajorFormat

_MOST = 1 << 24  # float32 holds every whole number up to here
_NO_CODE = -1


class WholeFormat(RowMajorFormat):
    """`i32` or `i64`: row-major; numbers are exact in float32, or they are refused."""

    def __init__(self, name: str, dtype: str) -> None:
        """`dtype` is the NumPy storage type."""
        self.name, self.code, self.dtype = name, _NO_CODE, np.dtype(dtype)

    def encode(self, weights: Floats) -> Bytes:
        """Whole numbers only.

        Raises:
            NumericsError: a number is none, or beyond 2^24.
        """
        items = np.rint(weights)
        if not (items == weights).all() or (np.abs(items) > _MOST).any():
            raise NumericsError(f"{self.name} holds whole numbers up to 2^24 alone")
        return np.ascontiguousarray(items.astype(self.dtype)).reshape(-1).view(np.uint8)

    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """As float32; NaN where a number is beyond 2^24, so that it is found."""
        items = np.frombuffer(resident.tobytes(), self.dtype, count=shape[0] * shape[1])
        exact = np.where(np.abs(items) <= _MOST, items.astype(np.float32), np.float32(np.nan))
        return np.asarray(exact, np.float32).reshape(shape)

    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """None: every number is finite."""
        return []


I32, I64 = WholeFormat("i32", "<i4"), WholeFormat("i64", "<i8")
