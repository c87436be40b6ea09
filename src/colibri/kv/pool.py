"""The pool of attention state: blocks of 64 positions, and cells of recurrent state.

Block b holds every layer's planes (`Plane`) of 64 positions of one sequence; a layer's share starts
at the same offset in each block, on a 64-byte boundary. The plane of a layer's keys lies transposed
within a block (see `kernels.api.KVPlane`). For `int8` the codes of a plane are followed by a
float32 scale for every row. A sequence of a model with recurrent layers, or with windows, has one
cell, which holds the states of all layers, and further cells for snapshots of it; what planes with
a window keep lies there as blocks that come round (`Ring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from colibri.errors import BudgetError
from colibri.formats import Bytes, padded
from colibri.kernels.api import KV_BLOCK, KV_UNIT, CellLayer, KVPlane
from colibri.kernels.mapping import Mapping
from colibri.kernels.shared_key import WINDOW_SLACK, CellWindow
from colibri.kv.ring import Ring
from colibri.kv.shape import KVFormat, StateShape, block_nbytes, cell_nbytes
from colibri.kv.state import KVState


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """Where one layer's state lies, for all sequences.

    Attributes:
        planes: as its `StateShape` lists them.
        cells: None where the layer keeps none.
        windows: as its `StateShape` lists them.
        ring: of planes with a window; tables of a step are its.
    """

    planes: tuple[KVPlane, ...]
    cells: CellLayer | None
    windows: tuple[CellWindow, ...] = ()
    ring: Ring | None = None


class KVPool:
    """Two private mappings, planned once; blocks and cells are reference-counted.

    Attributes:
        num_blocks: all blocks.
        block_nbytes: bytes of each.
        num_cells: all cells; 0 for a model without recurrent layers.
        cell_nbytes: bytes of each.
        slack: positions by which what a cell holds can be cut: 256 where that is windows alone.
    """

    def __init__(
        self, layers: Sequence[StateShape], num_blocks: int, fmt: KVFormat, num_cells: int = 0
    ) -> None:
        """Reserve the pool; it becomes resident as it is written.

        Raises:
            BudgetError: the system refuses the memory.
        """
        self.num_blocks, self.block_nbytes = num_blocks, block_nbytes(layers, fmt)
        self.cell_nbytes = cell_nbytes(layers, fmt)
        self.num_cells = num_cells if self.cell_nbytes else 0
        recurs = any(shape.cell_nbytes or shape.windows for shape in layers)
        self.slack = 0 if recurs or not self.num_cells else WINDOW_SLACK
        self._shapes, self._format = tuple(layers), fmt
        self._offsets = list(accumulate((s.block_nbytes(fmt) for s in layers), initial=0))
        self._cell_offsets = list(accumulate((s.cell_share(fmt) for s in layers), initial=0))
        self._blocks = Mapping(num_blocks * self.block_nbytes, "the K/V pool")
        self._cells = Mapping(self.num_cells * self.cell_nbytes, "recurrent state")
        self._owners = np.zeros(num_blocks, np.int32)
        self._free_cells = list(range(self.num_cells - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - int(np.count_nonzero(self._owners))

    @property
    def num_free_cells(self) -> int:
        """Cells that nobody holds."""
        return len(self._free_cells)

    def layer(self, index: int) -> LayerState:
        """The share of layer `index`."""
        shape, start = self._shapes[index], self._offsets[index]
        data, nbytes, ring = self._blocks.data, self.block_nbytes, self._ring(shape)
        if ring is not None:
            data, nbytes = self._cells.data, KV_UNIT
            own = shape.cell_share(self._format) - ring.num_blocks * ring.nbytes
            start = self._cell_offsets[index] + own
        planes = []
        for plane in shape.planes:
            planes.append(
                KVPlane(
                    pool=data,
                    format=plane.format or self._format,
                    block_nbytes=nbytes,
                    offset=start,
                    heads=plane.heads,
                    width=plane.width,
                    stride=plane.stride,
                )
            )
            start += plane.nbytes(self._format)
        return LayerState(tuple(planes), self._cell_layer(index), self._windows(index), ring)

    def _ring(self, shape: StateShape) -> Ring | None:
        if not shape.num_kept:
            return None
        return Ring(shape.num_kept, shape.layer_nbytes(self._format), self.cell_nbytes)

    def _cell_layer(self, index: int) -> CellLayer | None:
        nbytes = self._shapes[index].cell_nbytes
        if not nbytes:
            return None
        return CellLayer(self._cells.data, self.cell_nbytes, self._cell_offsets[index], nbytes)

    def _windows(self, index: int) -> tuple[CellWindow, ...]:
        shape, found = self._shapes[index], []
        start = self._cell_offsets[index] + padded(shape.cell_nbytes, KV_UNIT)
        for window in shape.windows:
            nbytes = window.nbytes(self._format)
            cells = CellLayer(self._cells.data, self.cell_nbytes, start, nbytes)
            found.append(CellWindow(cells, self._format, window.width, window.positions))
            start += nbytes
        return tuple(found)

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
        self.block(target)[:] = self.block(source)

    def allocate_cell(self) -> int | None:
        """A free cell, None where there is none; what it holds is unspecified."""
        return self._free_cells.pop() if self._free_cells else None

    def release_cell(self, cell: int) -> None:
        """Give a cell back."""
        self._free_cells.append(cell)

    def clear_cell(self, cell: int) -> None:
        """Zeros: the state before the first position."""
        self.cell(cell)[:] = 0

    def copy_cell(self, source: int, target: int) -> None:
        """Copy what a cell holds."""
        self.cell(target)[:] = self.cell(source)

    def close(self) -> None:
        """Give the memory back. Arrays that look at it stay valid and read zeros."""
        self._blocks.close()
        self._cells.close()

    def block(self, number: int) -> Bytes:
        """What a block holds, to read and write."""
        start = number * self.block_nbytes
        return self._blocks.data[start : start + self.block_nbytes]

    def cell(self, number: int) -> Bytes:
        """What a cell holds, to read and write."""
        start = number * self.cell_nbytes
        return self._cells.data[start : start + self.cell_nbytes]
