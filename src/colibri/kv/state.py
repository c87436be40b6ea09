"""The attention state of one sequence: the blocks that hold its positions, and its cell.

Blocks can be cut anywhere. A recurrent state cannot: it is that of one position only, so it goes
back to the nearest snapshot, and what lies between is computed again. A cell that holds nothing but
windows can be cut by as many positions as it keeps beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from colibri.errors import BudgetError, ContextLengthError
from colibri.formats import Bytes
from colibri.kernels.api import KV_BLOCK, Ints
from colibri.kv.shape import MOST_SNAPSHOTS

NO_CELL = -1
_MORE = 1  # where half of all cells are free: behind system and tools beside the last two prompts


class Blocks(Protocol):
    """Where blocks and cells are borrowed; see `KVPool`."""

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""

    @property
    def num_cells(self) -> int:
        """All cells there are; 0 for a model without recurrent layers."""

    @property
    def slack(self) -> int:
        """Positions by which what a cell holds can be cut."""

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

    @property
    def num_free_cells(self) -> int:
        """Cells that nobody holds."""

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


class _Kept(NamedTuple):
    """A cell that is kept, and the first of the positions that it can stand for."""

    cell: int
    first: int


class KVState:
    """Positions 0 to `length`, in blocks of the pool and, where the model is recurrent, a cell."""

    def __init__(self, pool: Blocks) -> None:
        """An empty sequence."""
        self._pool = pool
        self._blocks: list[int] = []
        self._length = 0
        self._cell = NO_CELL
        self._first = 0  # the shortest length that the cell can be cut to
        self._snapshots: dict[int, _Kept] = {}  # by length, the oldest first
        self._lasting: set[int] = set()  # lengths of those that make room last

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
        """Whether the state can go back to snapshots only, or by `slack` positions."""
        return self._pool.num_cells > 0

    @property
    def slack(self) -> int:
        """Positions by which a recurrent state can be cut."""
        return self._pool.slack

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
        self._first = max(self._first, length - self._pool.slack)

    def missing(self, length: int) -> tuple[int, int]:
        """Blocks, and cells, that `reserve(length)` would take."""
        cells = int(self.is_recurrent and self._cell == NO_CELL)
        return max(0, _num_blocks(length) - len(self._blocks)), cells

    def snapshot(self, length: int | None = None, *, lasting: bool = False) -> None:
        """Remember the recurrent state, if there is one and a cell for it.

        As it is now, or as it was at `length`, which it can be cut to. Where there is no room, the
        oldest snapshot makes some, a `lasting` one only where all are.
        """
        length = self._length if length is None else length
        if self._cell == NO_CELL or length < self._first:
            return
        if length not in self._snapshots:
            cell = self._room_for_snapshot()
            if cell is None:
                return
            self._pool.copy_cell(self._cell, cell)
            self._snapshots[length] = _Kept(cell, self._first)
        self._lasting &= self._snapshots.keys()
        self._lasting |= {length} if lasting else set()

    def _room_for_snapshot(self) -> int | None:
        """A cell: a free one, or that of a snapshot which it costs."""
        pool = self._pool
        plenty = 2 * pool.num_free_cells > pool.num_cells
        if len(self._snapshots) < MOST_SNAPSHOTS + (_MORE if plenty else 0):
            cell = pool.allocate_cell()
            if cell is not None:
                return cell
        return self._take_oldest()

    def _take_oldest(self) -> int | None:
        """The cell of the snapshot that makes room first."""
        oldest = sorted(self._snapshots, key=lambda length: length in self._lasting)[:1]
        return self._snapshots.pop(oldest[0]).cell if oldest else None

    def forget_snapshot(self) -> bool:
        """Give the cell of the oldest snapshot back; False where there is none."""
        cell = self._take_oldest()
        if cell is not None:
            self._pool.release_cell(cell)
        return cell is not None

    def seal(self) -> None:
        """What the cell holds was written by others: it stands for its own length alone."""
        self._first = self._length

    def reachable(self, length: int) -> int:
        """How many of the first `length` positions another sequence can begin with."""
        if not self.is_recurrent:
            return min(length, self._length)
        return self._source(length)[0]

    def _source(self, length: int) -> tuple[int, _Kept | None]:
        """How many of the first `length` positions some cell can stand for, and that cell."""
        found: tuple[int, _Kept | None] = (0, None)
        now = _Kept(self._cell, self._first)
        for end, kept in ((self._length, now), *self._snapshots.items()):
            at = min(end, length)
            if at >= kept.first and at > found[0]:
                found = at, kept
        return found

    def truncate(self, length: int) -> int:
        """Forget positions from `length` on; return how many remain.

        These are `length`, or for a recurrent state the nearest snapshot's. A block that is shared
        and now ends inside the sequence will be written to again, so it is replaced by a copy; this
        may raise BudgetError, and then nothing has changed.
        """
        if length >= self._length:
            return self._length
        source: _Kept | None = None
        if self.is_recurrent:
            length, source = self._source(length)
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
        self._restore(length, source)
        return length

    def block(self, index: int) -> Bytes:
        """What is kept of positions `64 * index` to `64 * index + 63`, to read and write."""
        return self._pool.block(self._blocks[index])

    def cells(self) -> dict[int, Bytes | None]:
        """The lengths that the state can go on from exactly, and its cell there, if it has one."""
        if self._cell == NO_CELL:
            return {self._length: None}
        kept = {length: snapshot.cell for length, snapshot in self._snapshots.items()}
        kept[self._length] = self._cell
        return {length: self._pool.cell(cell) for length, cell in kept.items()}

    def fork(self, length: int) -> KVState:
        """Another sequence with the first `reachable(length)` positions.

        Whole blocks are shared, never copied; a last one that is not whole is.

        Raises:
            BudgetError: no block or no cell is free. Nothing has changed then.
        """
        source: _Kept | None = None
        if self.is_recurrent:
            length, source = self._source(length)
        else:
            length = min(length, self._length)
        other, whole = KVState(self._pool), length // KV_BLOCK
        try:
            if source is not None:
                other._cell, other._first = other._new_cell(), source.first
                self._pool.copy_cell(source.cell, other._cell)
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
        dropped, self._blocks, self._length, self._first = self._blocks, [], 0, 0
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

    def _restore(self, length: int, source: _Kept | None) -> None:
        """The recurrent state after `length` positions: zero, a snapshot's, or what there is."""
        if self._cell != NO_CELL and source is None:
            self._pool.clear_cell(self._cell)
            self._first = 0
        elif source is not None and source.cell != self._cell:
            self._pool.copy_cell(source.cell, self._cell)
            self._first = source.first
        self._drop_snapshots(length + 1)

    def _drop_snapshots(self, length: int) -> None:
        for late in [kept for kept in self._snapshots if kept >= length]:
            self._pool.release_cell(self._snapshots.pop(late).cell)


def _num_blocks(length: int) -> int:
    return -(-length // KV_BLOCK)
