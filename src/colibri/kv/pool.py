"""The K/V pool: blocks of 64 positions for all layers at once, borrowed by sequences.

Block b holds every layer's keys and values of 64 positions of one sequence. A layer's share starts
at the same offset in each block, on a 64-byte boundary: K `[K, 64, head_dim]`, then V; for `int8`
each followed by a float32 scale for every head and position `[K, 64]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from colibri.errors import BudgetError
from colibri.formats import Bytes, FloatFormat, RowInt8Format, padded
from colibri.kernels.api import KV_BLOCK, KVLayer
from colibri.kernels.mapping import Mapping
from colibri.kv.state import KVState

_ALIGN = 64

KVFormat: TypeAlias = FloatFormat | RowInt8Format


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one attention layer keeps of a position."""

    num_kv_heads: int
    head_dim: int


def block_nbytes(layers: Sequence[KVShape], fmt: KVFormat) -> int:
    """Bytes of one block: 64 positions of all layers."""
    return sum(_layer_nbytes(shape, fmt) for shape in layers)


def _layer_nbytes(shape: KVShape, fmt: KVFormat) -> int:
    keys = fmt.nbytes((shape.num_kv_heads * KV_BLOCK, shape.head_dim))
    return padded(2 * keys, _ALIGN)


class KVPool:
    """One private mapping, planned once; blocks are reference-counted.

    Attributes:
        num_blocks: all blocks.
        block_nbytes: bytes of each.
    """

    def __init__(self, layers: Sequence[KVShape], num_blocks: int, fmt: KVFormat) -> None:
        """Reserve the pool; it becomes resident as blocks are written.

        Raises:
            BudgetError: the system refuses the memory.
        """
        self.num_blocks, self.block_nbytes = num_blocks, block_nbytes(layers, fmt)
        self._shapes, self._format = tuple(layers), fmt
        self._offsets = list(accumulate((_layer_nbytes(s, fmt) for s in layers), initial=0))
        self._mapping = Mapping(num_blocks * self.block_nbytes, "the K/V pool")
        self._owners = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - int(np.count_nonzero(self._owners))

    def layer(self, index: int) -> KVLayer:
        """The share of attention layer `index`."""
        shape = self._shapes[index]
        return KVLayer(
            pool=self._mapping.data,
            format=self._format,
            block_nbytes=self.block_nbytes,
            offset=self._offsets[index],
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )

    def open_state(self) -> KVState:
        """An empty sequence."""
        return KVState(self)

    def allocate(self, n: int) -> list[int]:
        """The `n` lowest free blocks, each with one owner; what they hold is unspecified.

        Raises:
            BudgetError: fewer are free; none is taken then.
        """
        if n > self.num_free:
            raise BudgetError(
                f"the K/V pool has {self.num_free} of {self.num_blocks} blocks of {KV_BLOCK} "
                f"positions free, {n} are needed: close a session, or raise kv_ram"
            )
        blocks: list[int] = np.flatnonzero(self._owners == 0)[:n].tolist()
        self._owners[blocks] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block; whoever shares a block must not write to it."""
        self._owners[list(blocks)] += 1

    def is_shared(self, block: int) -> bool:
        """Whether the block has several owners."""
        return bool(self._owners[block] > 1)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less; blocks without one are free again."""
        self._owners[list(blocks)] -= 1

    def copy(self, source: int, target: int) -> None:
        """Copy what a block holds."""
        self._block(target)[:] = self._block(source)

    def close(self) -> None:
        """Give the memory back. Arrays that look at it stay valid and read zeros."""
        self._mapping.close()

    def _block(self, number: int) -> Bytes:
        start = number * self.block_nbytes
        return self._mapping.data[start : start + self.block_nbytes]
