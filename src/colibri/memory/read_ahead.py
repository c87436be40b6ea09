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
        self._origin = [0] * num_slots  # 0: nothing, or leased since
        self._nbytes = [0] * num_slots
        self._sums = {origin: dict.fromkeys(_ENDS, 0) for origin in Origin}
        self.num_used = 0

    def begin(self, slots: list[int], nbytes: list[int], origin: Origin) -> None:
        """Records of `nbytes` are being read into `slots`."""
        for slot, size in zip(slots, nbytes, strict=True):
            self._origin[slot], self._nbytes[slot] = int(origin), size
        self._sums[origin]["read"] += sum(nbytes)

    def use(self, slots: list[int], loading: list[bool] | None = None) -> int:
        """`slots` are leased, some while `loading`; how many of them were read ahead."""
        found = 0
        for place, slot in enumerate(slots):
            if self._origin[slot]:
                self._end(slot, "late" if loading and loading[place] else "useful")
                found += 1
        self.num_used += found
        return found

    def drop(self, slot: int, failed: bool) -> None:
        """The slot is given up, if its read `failed` because of that."""
        self._end(slot, "failed" if failed else "wasted")

    def withdraw(self, slots: list[int]) -> None:
        """The reads of `slots` did not come to an end: as if nobody had asked for them."""
        for slot in slots:
            self._end(slot, "withdrawn")

    def of(self, origin: Origin) -> AheadBytes:
        """What became of such records."""
        return AheadBytes(**self._sums[origin])

    def _end(self, slot: int, how: str) -> None:
        """Books what was read ahead into the slot, if that was."""
        if origin := self._origin[slot]:
            self._origin[slot] = 0
            self._sums[Origin(origin)][how] += self._nbytes[slot]


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
