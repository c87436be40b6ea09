"""The attention state of one sequence: the blocks that hold its positions, and its cell.

Blocks can be cut anywhere. A recurrent state cannot: it is that of one position only, so it goes
back to the nearest snapshot, and what lies between is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from colibri.errors import BudgetError, ContextLengthError
from colibri.formats import Bytes
from colibri.kernels.api import KV_BLOCK, Ints

NO_CELL = -1
MOST_SNAPSHOTS = 2  # of one sequence: before the end of a prompt, and one older


class Blocks(Protocol):
    """Where blocks and cells are borrowed; see `KVPool`."""

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""

    @property
    def num_cells(self) -> int:
        """All cells there are; 0 for a model without recurrent layers."""

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks; raises BudgetError."""

    def share(self, blocks: Sequence[int]) -> None:
        """Become another owner of blocks."""

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""

    def copy(self, source: int, target: int) -> None:
        """Copy what a block holds."""

    def allocate_cell(self) -> int | None:
        """Take a cell, if one is free."""

    def release_cell(self, cell: int) -> None:
        """Give a cell back."""

    def clear_cell(self, cell: int) -> None:
        """Make it the state before the first position."""

    def copy_cell(self, source: int, target: int) -> None:
        """Copy what a cell holds."""

    def block(self, number: int) -> Bytes:
        """What a block holds."""

    def cell(self, number: int) -> Bytes:
        """What a cell holds."""


class KVState:
    """Positions 0 to `length`, in blocks of the pool and, where the model is recurrent, a cell."""

    def __init__(self, pool: Blocks) -> None:
        """An empty sequence."""
        self._pool = pool
        self._blocks: list[int] = []
        self._length = 0
        self._cell = NO_CELL
        self._snapshots: dict[int, int] = {}  # length -> cell, the oldest first

    @property
    def length(self) -> int:
        """Positions that there is room for and that may be written or read."""
        return self._length

    @property
    def table(self) -> Ints:
        """The blocks `[B]` of positions 0-63, 64-127 and so on."""
        return np.array(self._blocks, np.int32)

    @property
    def cell(self) -> int:
        """The cell of the recurrent state, -1 where there is none."""
        return self._cell

    @property
    def is_recurrent(self) -> bool:
        """Whether the state can go back to snapshots only."""
        return self._pool.num_cells > 0

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`.

        Raises:
            ContextLengthError: more than the whole pool holds.
            BudgetError: other sequences hold the blocks. The state is unchanged in both cases.
        """
        if length <= self._length:
            return
        needed = _num_blocks(length)
        if needed > self._pool.num_blocks:
            raise ContextLengthError(
                f"{length} positions need {needed} blocks of the K/V pool, which has "
                f"{self._pool.num_blocks} ({self._pool.num_blocks * KV_BLOCK} positions): "
                "shorten the prompt or max_tokens, or raise context_length"
            )
        if self.is_recurrent and self._cell == NO_CELL:
            self._cell = self._new_cell()
            self._pool.clear_cell(self._cell)
        if needed > len(self._blocks):
            self._blocks += self._pool.allocate(needed - len(self._blocks))
        self._length = length

    def missing(self, length: int) -> tuple[int, int]:
        """Blocks, and cells, that `reserve(length)` would take."""
        cells = int(self.is_recurrent and self._cell == NO_CELL)
        return max(0, _num_blocks(length) - len(self._blocks)), cells

    def snapshot(self) -> None:
        """Remember the recurrent state as it is now, if there is one and a cell for it.

        Where all cells are taken, or this sequence has two, its oldest snapshot makes room.
        """
        if self._cell == NO_CELL or self._length in self._snapshots:
            return
        room = len(self._snapshots) < MOST_SNAPSHOTS
        cell = self._pool.allocate_cell() if room else None
        if cell is None and self._snapshots:
            cell = self._snapshots.pop(next(iter(self._snapshots)))
        if cell is not None:
            self._pool.copy_cell(self._cell, cell)
            self._snapshots[self._length] = cell

    def reachable(self, length: int) -> int:
        """How many of the first `length` positions another sequence can begin with."""
        if not self.is_recurrent:
            return min(length, self._length)
        kept = [*self._snapshots, self._length]
        return max((at for at in kept if at <= length), default=0)

    def truncate(self, length: int) -> int:
        """Forget positions from `length` on; return how many remain.

        These are `length`, or for a recurrent state the nearest snapshot's. A block that is shared
        and now ends inside the sequence will be written to again, so it is replaced by a copy; this
        may raise BudgetError, and then nothing has changed.
        """
        if length >= self._length:
            return self._length
        if self.is_recurrent:
            length = max((kept for kept in self._snapshots if kept <= length), default=0)
        keep = _num_blocks(length)
        last = self._blocks[keep - 1] if length % KV_BLOCK else None
        if last is not None and self._pool.is_shared(last):
            own = self._pool.allocate(1)[0]
            self._pool.copy(last, own)
            self._pool.release([last])
            self._blocks[keep - 1] = own
        dropped, self._blocks = self._blocks[keep:], self._blocks[:keep]
        self._length = length
        self._pool.release(dropped)
        self._restore(length)
        return length

    def block(self, index: int) -> Bytes:
        """What is kept of positions `64 * index` to `64 * index + 63`, to read and write."""
        return self._pool.block(self._blocks[index])

    def cells(self) -> dict[int, Bytes | None]:
        """The lengths that the state can go on from exactly, and its cell there, if it has one."""
        if self._cell == NO_CELL:
            return {self._length: None}
        kept = {**self._snapshots, self._length: self._cell}
        return {length: self._pool.cell(cell) for length, cell in kept.items()}

    def fork(self, length: int) -> KVState:
        """Another sequence with the first `reachable(length)` positions.

        Whole blocks are shared, never copied; a last one that is not whole is.

        Raises:
            BudgetError: no block or no cell is free. Nothing has changed then.
        """
        length = self.reachable(length)
        other, whole = KVState(self._pool), length // KV_BLOCK
        try:
            if self._cell != NO_CELL and length:
                other._cell = other._new_cell()
                self._pool.copy_cell(self._snapshots.get(length, self._cell), other._cell)
            if length % KV_BLOCK:
                other._blocks = self._pool.allocate(1)
                self._pool.copy(self._blocks[whole], other._blocks[0])
        except BudgetError:
            other.close()
            raise
        self._pool.share(self._blocks[:whole])
        other._blocks = self._blocks[:whole] + other._blocks
        other._length = length
        return other

    def close(self) -> None:
        """Give everything back; closing twice is fine."""
        dropped, self._blocks, self._length = self._blocks, [], 0
        self._pool.release(dropped)
        self._drop_snapshots(0)
        if self._cell != NO_CELL:
            self._pool.release_cell(self._cell)
            self._cell = NO_CELL

    def _new_cell(self) -> int:
        cell = self._pool.allocate_cell()
        if cell is None:
            raise BudgetError(
                f"all {self._pool.num_cells} cells of recurrent state are taken: close a session, "
                "or raise max_sessions"
            )
        return cell

    def _restore(self, length: int) -> None:
        """The recurrent state after `length` positions, which is zero or a snapshot."""
        self._drop_snapshots(length + 1)
        if self._cell != NO_CELL and length in self._snapshots:
            self._pool.copy_cell(self._snapshots[length], self._cell)
        elif self._cell != NO_CELL:
            self._pool.clear_cell(self._cell)

    def _drop_snapshots(self, length: int) -> None:
        for late in [kept for kept in self._snapshots if kept >= length]:
            self._pool.release_cell(self._snapshots.pop(late))


def _num_blocks(length: int) -> int:
    return -(-length // KV_BLOCK)
