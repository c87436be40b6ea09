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


_ENDS = ("read", "useful", "late", "wasted", "failed", "withdrawn")


class ReadAhead:
    """Which slots hold what was read ahead and not leased since, and what became of the rest.

    Attributes:
        num_used: records that were leased after they had been read ahead.
    """

    def __init__(self, num_slots: int) -> None:
        self._origin = np.zeros(num_slots, np.int8)  # 0: nothing, or leased since
        self._nbytes: Numbers = np.zeros(num_slots, np.int64)
        self._sums = {origin: dict.fromkeys(_ENDS, 0) for origin in Origin}
        self.num_used = 0

    def begin(self, slots: Numbers, nbytes: Numbers, origin: Origin) -> None:
        """Records of `nbytes [n]` are being read into `slots [n]`."""
        self._origin[slots], self._nbytes[slots] = origin, nbytes
        self._sums[origin]["read"] += int(nbytes.sum())

    def use(self, slots: Numbers, loading: NDArray[np.bool_] | None = None) -> int:
        """`slots [n]` are leased, some while `loading [n]`; how many of them were read ahead."""
        late = None if loading is None else loading.tolist()
        num_found = self._end(slots, "useful", "late", late)
        self.num_used += num_found
        return num_found

    def drop(self, slots: Numbers, failed: NDArray[np.bool_]) -> None:
        """`slots [n]` are given up, some because their reads `failed [n]`."""
        self._end(slots, "wasted", "failed", failed.tolist())

    def withdraw(self, slots: Numbers) -> None:
        """The reads of `slots [n]` did not come to an end: as if nobody had asked for them."""
        self._end(slots, "withdrawn", "withdrawn", None)

    def of(self, origin: Origin) -> AheadBytes:
        """What became of such records."""
        return AheadBytes(**self._sums[origin])

    def _end(self, slots: Numbers, usual: str, other: str, is_other: list[bool] | None) -> int:
        """Books what was read ahead into `slots [n]`; how many that were.

        Slots are few: numbers of Python are faster than arrays.
        """
        found: list[int] = self._origin[slots].tolist()
        if not any(found):
            return 0
        self._origin[slots] = 0
        sizes = self._nbytes[slots].tolist()
        others = is_other or [False] * len(found)
        for origin, nbytes, turns in zip(found, sizes, others, strict=True):
            if origin:
                self._sums[Origin(origin)][other if turns else usual] += nbytes
        return len(found) - found.count(0)


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
