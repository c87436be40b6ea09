"""The slots: one private mapping, reserved whole, touched in the background in slot order.

A slot that is not touched yet serves as well, only more slowly: the first token waits for nothing.
The plan counts the mapping whole, huge pages included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.formats import Bytes
from colibri.kernels.api import EMPTY, Ints
from colibri.kernels.library import Library
from colibri.kernels.mapping import Mapping, mapping_nbytes
from colibri.memory.toucher import Toucher

_STAGING = 16 << 20


class Arena:
    """Slots of one or more sizes, one after another; they never move.

    Attributes:
        data: the mapping `[nbytes]`.
        bases: `[num_slots]` int64, where each slot starts; multiples of 4096.
        ranges: the slots of each class.
        parts: `[num_slots, 3]` int64, where gate, up and down of the record in a slot start.
        biases: likewise their biases, or None where experts have none.
        staging: `[num_buffers, nbytes]`, where records are read that have to be packed.
        states: `[num_slots]` int32.
        touched: `[num_slots]` whether a slot takes memory; its owner marks it, too.
        usable: `[num_slots]` whether it may: its owner marks it.
        words: `[num_slots + 1]`, the states and a word that stays EMPTY, where slot -1 looks.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        staging_nbytes: int = 0,
        biased: bool = False,
    ) -> None:
        """Reserve `counts[c]` slots of `sizes[c]` bytes for each class c.

        Staging buffers are of `staging_nbytes`, whole pages; `biased` says that experts have
        biases.

        Raises:
            BudgetError: the system refuses the memory.
        """
        owners = np.repeat(np.asarray(sizes, np.int64), counts)
        ends = np.cumsum(owners)
        starts = np.cumsum([0, *counts]).tolist()
        self._mapping = Mapping(int(ends[-1]) if len(ends) else 0, "expert slots")
        self.data: Bytes = self._mapping.data
        self.bases: NDArray[np.int64] = ends - owners
        self.ranges = [range(*bounds) for bounds in pairwise(starts)]
        self.parts: NDArray[np.int64] = np.zeros((len(ends), 3), np.int64)
        self.biases = np.zeros((len(ends), 3), np.int64) if biased else None
        buffers = num_buffers(staging_nbytes)
        self._staging = Mapping(buffers * staging_nbytes, "staging buffers")
        self.staging: Bytes = self._staging.data.reshape(buffers, staging_nbytes)
        self.words: Ints = np.full(len(ends) + 1, EMPTY, np.int32)
        self.states: Ints = self.words[:-1]
        self.touched = np.zeros(len(ends), bool)
        self.usable = np.ones(len(ends), bool)
        self._bounds: NDArray[np.int64] = np.append(self.bases, self.data.size)
        self._toucher: Toucher | None = None

    @property
    def num_slots(self) -> int:
        """Slots of all classes together."""
        return len(self.states)

    def touch_ahead(self, library: Library | None) -> None:
        """Make usable slots resident from now on, on a thread of the library if there is one."""
        if library is not None and self.num_slots:
            self._toucher = Toucher(library, self.data, self._bounds, self.usable, self.touched)

    def discard(self, slots: NDArray[np.int64]) -> None:
        """Give the memory of `slots [n]` (ascending), not usable any more, back."""
        with nullcontext() if self._toucher is None else self._toucher.held():
            self._discard(slots)

    def allow(self, slots: NDArray[np.int64]) -> None:
        """Slots `[n]` are usable again."""
        with nullcontext() if self._toucher is None else self._toucher.held():
            self.usable[slots] = True

    def _discard(self, slots: NDArray[np.int64]) -> None:
        self.usable[slots] = False
        for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
            if len(run):
                start, stop = int(self._bounds[run[0]]), int(self._bounds[run[-1] + 1])
                self._mapping.discard(start, stop - start)
        self.touched[slots] = False

    def close(self) -> None:
        """Give the memory back, after the reader has stopped. Views stay valid and read zeros."""
        if self._toucher is not None:
            self._toucher.close()
        self._mapping.close()
        self._staging.close()


def num_buffers(staging_nbytes: int) -> int:
    """Staging buffers of that size: more of small ones, since a block is at most one record.

    At most three records wait half read; a fourth buffer serves whoever reads.
    """
    return min(max(_STAGING // staging_nbytes, 4), 16) if staging_nbytes else 0


def staging_nbytes(index: ExpertIndex) -> int:
    """Bytes of the staging buffer of the largest record."""
    return max((layout.staging_nbytes for layout in index.layers), default=0)


def arena_nbytes(slots_nbytes: int) -> int:
    """The most memory that an arena with slots of so many bytes can occupy."""
    return mapping_nbytes(slots_nbytes)
