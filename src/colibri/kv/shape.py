"""What a layer keeps of a sequence: planes that grow with its positions, a cell that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from colibri.formats import FloatFormat, RowInt8Format, padded
from colibri.kernels.api import KV_BLOCK
from colibri.kernels.shared_key import WINDOW_SLACK

KVFormat: TypeAlias = FloatFormat | RowInt8Format

_ALIGN = 64
MOST_SNAPSHOTS = 2  # of one sequence: before the end of a prompt, and one older


@dataclass(frozen=True, slots=True)
class Plane:
    """A matrix `[heads * entries, width]` in each block of 64 positions.

    Attributes:
        heads: rows of one entry.
        width: numbers of one row.
        stride: positions that share an entry; above 64, only every `stride / 64`-th block's entry
            is used.
        format: None for the format of the pool.
        window: the last positions that count; None where all do.
    """

    heads: int
    width: int
    stride: int = 1
    format: FloatFormat | None = None
    window: int | None = None

    @property
    def entries(self) -> int:
        """Entries of one block."""
        return max(1, KV_BLOCK // self.stride)

    @property
    def num_kept(self) -> int:
        """Blocks of a sequence that are kept: those of the window and 256 more; 0 keeps all."""
        if self.window is None:
            return 0
        # So many blocks may neighbouring positions touch, wherever the first of them stands.
        return (self.window + WINDOW_SLACK - 3) // KV_BLOCK + 2

    def nbytes(self, pool: KVFormat) -> int:
        """Bytes in one block, a multiple of 64."""
        return padded((self.format or pool).nbytes((self.heads * self.entries, self.width)), _ALIGN)


@dataclass(frozen=True, slots=True)
class Window:
    """The last positions of a sequence, a row each; position p lies in row `p % positions`.

    Attributes:
        width: numbers of one row.
        positions: rows.
    """

    width: int
    positions: int

    def nbytes(self, pool: KVFormat) -> int:
        """Bytes in one cell, a multiple of 64."""
        return padded(pool.nbytes((self.positions, self.width)), _ALIGN)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer keeps of a sequence.

    Attributes:
        planes: paged by position, in this order in a block. Where they have a window, which is the
            same for all, the last blocks of a sequence lie in its cell, and no others are kept.
        cell_nbytes: bytes that do not grow: the state of a recurrence.
        windows: rows that do not grow either, in the format of the pool.
    """

    planes: tuple[Plane, ...] = ()
    cell_nbytes: int = 0
    windows: tuple[Window, ...] = ()

    @classmethod
    def keys_and_values(
        cls, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> StateShape:
        """K, then V, of grouped-query attention, of all positions or of a window."""
        plane = Plane(num_kv_heads, head_dim, window=window)
        return cls((plane, plane))

    @property
    def num_kept(self) -> int:
        """Blocks of its planes that a cell keeps; 0 where they are in the pool's blocks."""
        return max((plane.num_kept for plane in self.planes), default=0)

    def layer_nbytes(self, fmt: KVFormat) -> int:
        """Bytes of this layer's planes of 64 positions, wherever these are kept."""
        return sum(plane.nbytes(fmt) for plane in self.planes)

    def block_nbytes(self, fmt: KVFormat) -> int:
        """Bytes of this layer in one block."""
        return 0 if self.num_kept else self.layer_nbytes(fmt)

    def cell_share(self, fmt: KVFormat) -> int:
        """Bytes of this layer in one cell, a multiple of 64: its state, its windows, its blocks."""
        own = padded(self.cell_nbytes, _ALIGN) + sum(each.nbytes(fmt) for each in self.windows)
        return own + self.num_kept * self.layer_nbytes(fmt)

    def within(self, positions: int) -> StateShape:
        """The same for sequences of at most so many positions.

        A window keeps its blocks once a cell, and a sequence may have three; where these were more
        than its positions, all of them are kept instead.
        """
        if (1 + MOST_SNAPSHOTS) * self.num_kept * KV_BLOCK <= positions:
            return self
        return replace(self, planes=tuple(replace(each, window=None) for each in self.planes))


def fills_blocks(stride: int) -> bool:
    """Whether an entry of so many positions ends where blocks do."""
    return stride > 0 and (KV_BLOCK % stride == 0 or stride % KV_BLOCK == 0)


def block_nbytes(layers: Sequence[StateShape], fmt: KVFormat) -> int:
    """Bytes of one block: 64 positions of all layers; a line where no layer keeps any."""
    return sum(shape.block_nbytes(fmt) for shape in layers) or _ALIGN


def cell_nbytes(layers: Sequence[StateShape], fmt: KVFormat) -> int:
    """Bytes of one cell: what one sequence keeps in all layers, however long it is."""
    return sum(shape.cell_share(fmt) for shape in layers)
