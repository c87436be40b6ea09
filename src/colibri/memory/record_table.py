"""From (layer, expert, slot) to what reader and kernels need: the index, ready for arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex, ExpertLayerLayout
from colibri.memory.jobs import PAGE, Jobs, Queue, scans_of, steps_of

Int64s = NDArray[np.int64]


class RecordTable:
    """Columns of the index and constants of each layer; `row` is a layer's row in the index."""

    def __init__(self, index: ExpertIndex) -> None:
        self._index = index
        self._scans = [scans_of(layout) for layout in index.layers]
        self._steps = [steps_of(layout.packings) for layout in index.layers]
        self._staged = [_flags(layout, index.file.shape[2]) for layout in index.layers]
        self._regions = [_padded(layout, index.file.shape[2]) for layout in index.layers]
        self._deltas = [
            _aligned(index, row, self._regions[row]) for row in range(len(index.layers))
        ]
        self._sizes: Int64s = index.nbytes.sum(axis=2)

    def parts(self, row: int, experts: Int64s, bases: Int64s) -> Int64s:
        """Arena offsets `[n, 3]` of gate, up and down of `experts [n]` in slots at `bases [n]`."""
        deltas = self._deltas[row]
        if deltas is None:
            layout = self._index.layers[row]
            pieces = list(layout.part_pieces)
            slack = self._index.offset[row, experts][:, pieces] % PAGE
            deltas = np.array(layout.part_deltas) + self._regions[row][pieces] + slack
        found: Int64s = bases[:, None] + deltas
        return found

    def biases(self, row: int, bases: Int64s) -> Int64s:
        """Arena offsets `[n, 3]` of the biases of records in slots at `bases [n]`."""
        found: Int64s = bases[:, None] + np.array(self._index.layers[row].biases)
        return found

    def nbytes(self, row: int, experts: Int64s) -> Int64s:
        """Bytes `[n]` of the records of `experts [n]`."""
        found: Int64s = self._sizes[row].take(experts)
        return found

    def jobs(self, row: int, experts: Int64s, slots: Int64s, bases: Int64s, queue: Queue) -> Jobs:
        """Reads of `experts [n]` into `slots [n]`, in file order; prefetches keep the order given.

        `bases [num_slots]` is where all slots start.
        """
        index = self._index
        if queue is not Queue.PREFETCH and len(experts) > 1:
            order = np.lexsort((index.offset[row, experts, 0], index.file[row, experts, 0]))
            experts, slots = experts[order], slots[order]
        return Jobs(
            slots=slots.astype(np.int32),
            records=experts + row * index.file.shape[1],
            files=index.file[row].take(experts, axis=0),
            offsets=index.offset[row].take(experts, axis=0),
            nbytes=index.nbytes[row].take(experts, axis=0),
            targets=self._targets(row, bases[slots]),
            crcs=None if index.crc is None else index.crc[row].take(experts),
            scans=self._scans[row],
            queue=queue,
            bases=bases[slots],
            staged=self._staged[row],
            packings=index.layers[row].packings,
            steps=self._steps[row],
        )

    def _targets(self, row: int, bases: Int64s) -> Int64s:
        """Where pieces go: staged ones count from a buffer, whichever it will be."""
        staged, regions = self._staged[row], self._regions[row]
        if not staged.size:
            return bases[:, None] + regions
        found: Int64s = np.where(staged, 0, bases[:, None]) + regions
        return found


def _aligned(index: ExpertIndex, row: int, regions: Int64s) -> Int64s | None:
    """Where parts start in a slot `[3]`; None where that is not the same for all experts."""
    layout = index.layers[row]
    deltas = np.array(layout.part_deltas)
    if layout.part_pieces[0] < 0:  # packed: always at the same place
        return deltas
    pieces = list(layout.part_pieces)
    if (index.offset[row][:, pieces] % PAGE).any():
        return None
    found: Int64s = deltas + regions[pieces]
    return found


def _flags(layout: ExpertLayerLayout, num_pieces: int) -> NDArray[np.uint8]:
    """Which pieces are staged `[P]`; empty where none is."""
    if not any(layout.staged):
        return np.zeros(0, np.uint8)
    flags = np.zeros(num_pieces, np.uint8)
    flags[: len(layout.staged)] = layout.staged
    return flags


def _padded(layout: ExpertLayerLayout, num_pieces: int) -> Int64s:
    """Slot offsets of the regions `[P]`, 0 where this layer has fewer pieces than others."""
    regions = np.zeros(num_pieces, np.int64)
    regions[: len(layout.regions)] = layout.regions
    return regions
