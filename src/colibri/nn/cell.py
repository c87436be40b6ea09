"""The shares of one layer's cell: each recurrence of the layer has its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from colibri.formats import padded
from colibri.kernels.api import CellLayer

_ALIGN = 64
T = TypeVar("T", bound=np.generic)


def shares_nbytes(sizes: Sequence[int]) -> int:
    """Bytes of a cell with shares of these sizes, each on a 64-byte boundary."""
    return sum(padded(size, _ALIGN) for size in sizes)


def shares(cell: CellLayer | None, sizes: Sequence[int]) -> list[CellLayer]:
    """The shares, in order."""
    if cell is None or cell.nbytes != shares_nbytes(sizes):
        raise ValueError(f"shares of {list(sizes)} bytes do not make up {cell}")
    starts = accumulate((padded(size, _ALIGN) for size in sizes), initial=cell.offset)
    return [
        CellLayer(cell.pool, cell.cell_nbytes, start, size)
        for start, size in zip(starts, sizes, strict=False)
    ]


def cell_of(layer: CellLayer, cell: int, kind: type[T]) -> NDArray[T]:
    """What the layer keeps in cell number `cell`, as numbers that may be written to."""
    start = cell * layer.cell_nbytes + layer.offset
    return layer.pool[start : start + layer.nbytes].view(kind)
