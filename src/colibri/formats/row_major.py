"""What formats of plain items have in common: rows one behind the other, resident as stored."""

from __future__ import annotations

import numpy as np

from colibri.formats.base import PANEL_ROWS, Bytes, Format, Shape


class RowMajorFormat(Format):
    """Items of one NumPy type; nothing is padded and pack changes nothing."""

    dtype: np.dtype[np.generic]

    @property
    def is_plain(self) -> bool:
        """It is."""
        return True

    def nbytes(self, shape: Shape) -> int:
        """N * K items, no padding."""
        return shape[0] * shape[1] * self.dtype.itemsize

    def resident_nbytes(self, shape: Shape) -> int:
        """Same as stored."""
        return self.nbytes(shape)

    def panel_nbytes(self, columns: int) -> int:
        """Eight rows."""
        return PANEL_ROWS * columns * self.dtype.itemsize

    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """The bytes themselves."""
        return stored
