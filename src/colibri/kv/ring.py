"""Blocks that come round: what a sequence keeps of planes with a window lies in its cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import KV_UNIT, Batch, Ints
from colibri.kernels.shared_key import WINDOW_SLACK


@dataclass(frozen=True, slots=True)
class Ring:
    """Block b of a sequence lies in place `b % num_blocks` of its cell.

    Attributes:
        num_blocks: places of a cell.
        nbytes: of a place.
        cell_nbytes: from one cell to the next.
    """

    num_blocks: int
    nbytes: int
    cell_nbytes: int

    def tables(self, cells: Ints, width: int) -> Ints:
        """`[S, width]` where the blocks of sequences in `cells [S]` lie, in units of 64 bytes."""
        places = np.arange(width, dtype=np.int64) % self.num_blocks * self.nbytes
        starts = cells[:, None] * np.int64(self.cell_nbytes)
        return ((starts + places) // KV_UNIT).astype(np.int32)

    def turns(self, batch: Batch) -> Iterator[tuple[Ints | None, Batch]]:
        """The rows of a step as the window takes them in, in order; None for all of them at once.

        A key may be written over once 256 more positions are there, so that a sequence gives at
        most so many rows at a time.
        """
        tables = self.tables(batch.cells, batch.block_tables.shape[1])
        within = replace(batch, block_tables=tables)
        turn = _turns(batch)
        if not turn.any():
            yield None, within
            return
        for number in range(int(turn.max()) + 1):
            chosen = turn == number
            yield np.flatnonzero(chosen).astype(np.int32), within.narrowed(chosen)


def _turns(batch: Batch) -> NDArray[np.int64]:
    """`[T]` the turn of each row: how many whole runs of its sequence come before it."""
    first = np.full(len(batch.cells), np.iinfo(np.int32).max, np.int64)
    np.minimum.at(first, batch.members, batch.positions)
    return (batch.positions - first[batch.members]) // WINDOW_SLACK
