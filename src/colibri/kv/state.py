"""The attention state of one sequence: the blocks that hold its positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from colibri.errors import ContextLengthError
from colibri.kernels.api import KV_BLOCK, Ints


class Blocks(Protocol):
    """Where blocks are borrowed; see `KVPool`."""

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""

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


class KVState:
    """Positions 0 to `length`, in blocks of the pool."""

    def __init__(self, pool: Blocks) -> None:
        """An empty sequence."""
        self._pool = pool
        self._blocks: list[int] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Positions that there is room for and that may be written or read."""
        return self._length

    @property
    def table(self) -> Ints:
        """The blocks `[B]` of positions 0-63, 64-127 and so on."""
        return np.array(self._blocks, np.int32)

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
        self._blocks += self._pool.allocate(needed - len(self._blocks))
        self._length = length

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on and give their blocks back.

        A block that is shared and now ends inside the sequence will be written to again, so it is
        replaced by a copy; this may raise BudgetError, and then nothing has changed.
        """
        if length >= self._length:
            return
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

    def fork(self, length: int) -> KVState:
        """Another sequence with the same first positions: whole blocks are shared, never copied.

        Args:
            length: positions to have in common, a multiple of 64, at most `length`.
        """
        if length % KV_BLOCK or not 0 <= length <= self._length:
            raise ValueError(f"{length} is no whole number of blocks below {self._length}")
        other = KVState(self._pool)
        other._blocks = self._blocks[: length // KV_BLOCK]
        other._length = length
        self._pool.share(other._blocks)
        return other

    def close(self) -> None:
        """Give all blocks back; closing twice is fine."""
        dropped, self._blocks, self._length = self._blocks, [], 0
        self._pool.release(dropped)


def _num_blocks(length: int) -> int:
    return -(-length // KV_BLOCK)
