"""Books on records that were read before anybody asked for them: what became of their bytes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import LOADING, Ints
from colibri.memory.store_stats import AheadBytes

Numbers = NDArray[np.int64]


class Origin(IntEnum):
    """Why a record was read ahead."""

    PREDICTED = 1  # a layer will probably want it within the token
    WARMED = 2  # earlier runs used it most


class ReadAhead:
    """Which slots hold what was read ahead and not leased since, and what became of the rest.

    Attributes:
        num_used: records that were leased after they had been read ahead.
    """

    def __init__(self, num_slots: int) -> None:
        self._origin = np.zeros(num_slots, np.int8)  # 0: nothing, or leased since
        self._nbytes: Numbers = np.zeros(num_slots, np.int64)
        self._sums = {origin: AheadBytes() for origin in Origin}
        self.num_used = 0

    def begin(self, slots: Numbers, nbytes: Numbers, origin: Origin) -> None:
        """Records of `nbytes [n]` are being read into `slots [n]`."""
        self._origin[slots], self._nbytes[slots] = origin, nbytes
        self._add(origin, read=int(nbytes.sum()))

    def use(self, slots: Numbers, loading: NDArray[np.bool_] | None = None) -> int:
        """`slots [n]` are leased, some while `loading [n]`; how many of them were read ahead."""
        found = self._origin[slots]
        num_found = int(np.count_nonzero(found))
        if num_found:
            self.num_used += num_found
            late = np.zeros(len(slots), bool) if loading is None else loading
            for origin in Origin:
                own = found == origin
                self._add(
                    origin,
                    useful=self._total(slots[own & ~late]),
                    late=self._total(slots[own & late]),
                )
            self._origin[slots] = 0
        return num_found

    def drop(self, slots: Numbers, failed: NDArray[np.bool_]) -> None:
        """`slots [n]` are given up, some because their reads `failed [n]`."""
        found = self._origin[slots]
        if found.any():
            for origin in Origin:
                own = found == origin
                self._add(
                    origin,
                    wasted=self._total(slots[own & ~failed]),
                    failed=self._total(slots[own & failed]),
                )
            self._origin[slots] = 0

    def withdraw(self, slots: Numbers) -> None:
        """The reads of `slots [n]` never began: as if nobody had asked for them."""
        for origin in Origin:
            own = slots[self._origin[slots] == origin]
            self._add(origin, withdrawn=self._total(own))
        self._origin[slots] = 0

    def of(self, origin: Origin) -> AheadBytes:
        """What became of such records."""
        return self._sums[origin]

    def _total(self, slots: Numbers) -> int:
        return int(self._nbytes[slots].sum())

    def _add(self, origin: Origin, **amounts: int) -> None:
        self._sums[origin] = self._sums[origin].plus(**amounts)


class Background:
    """Which slots are to be read into when there is nothing else to read."""

    def __init__(self, states: Ints, leases: Ints) -> None:
        """`states [num_slots]` of all slots, and how many `leases [num_slots]` hold each."""
        self._states, self._leases, self._slots = states, leases, np.empty(0, np.int64)

    @property
    def slots(self) -> Numbers:
        """Those that nobody has demanded and that have not landed; some are being read into."""
        slots = self._slots
        if len(slots):
            waits = (self._states[slots] == LOADING) & (self._leases[slots] == 0)
            self._slots = slots[waits]
        return self._slots

    def add(self, slots: Numbers) -> None:
        """`slots [n]` wait as well."""
        self._slots = np.union1d(self._slots, slots)

    def among(self, slots: Numbers) -> Numbers:
        """Those of `slots [n]` that wait."""
        waiting = self.slots
        return np.intersect1d(slots, waiting) if len(waiting) else waiting

    def within(self, slots: range) -> Numbers:
        """The same of a range."""
        first, last = np.searchsorted(self.slots, (slots.start, slots.stop))
        return self._slots[first:last]
