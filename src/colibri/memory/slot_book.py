"""Who is in which slot, and who holds it.

A lease wants few experts, and weights have just swept the caches: numbers of Python, read through
memoryviews, take a third of the time of NumPy's operations, whose code has to come from memory.

The books are consistent at each step, so that Ctrl-C may come anywhere: an expert may be forgotten,
but no slot has two owners.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import EMPTY, FAILED, LOADING, READY, Ints
from colibri.memory.arena import Arena
from colibri.memory.eviction import Keys
from colibri.memory.read_ahead import ReadAhead
from colibri.memory.slot_ranges import SlotRanges

Numbers = NDArray[np.int64]
Room = tuple[Numbers, Keys]  # idle slots, and whose they are
NOWHERE = -1


class SlotBook:
    """Slots, their owners by key (row of the layer times E plus expert), and leases.

    Attributes:
        slot_of: `[num_keys]` where each expert is, or NOWHERE.
        key_of: `[num_slots]` whose each slot is, or NOWHERE.
        leases: `[num_slots]` how many hold each.
        ahead: what was read before anybody asked.
        where, owners, holds, words: memoryviews of the first three and of the slots' states.
    """

    def __init__(self, num_keys: int, arena: Arena) -> None:
        """Nothing is anywhere."""
        # 64 bits wide: NumPy has to convert other integers before it can index by them.
        self.slot_of: Numbers = np.full(num_keys, NOWHERE, np.int64)
        self.key_of: Keys = np.full(arena.num_slots, NOWHERE, np.int64)
        self.leases: Ints = np.zeros(arena.num_slots, np.int32)
        self.ahead = ReadAhead(arena.num_slots)
        self.where, self.owners = self.slot_of.data, self.key_of.data
        self.holds, self.words = self.leases.data, arena.words.data
        self._states = arena.states

    def all_ready(self, slots: list[int]) -> bool:
        """Whether each of `slots` holds a whole record; NOWHERE does not."""
        return [self.words[slot] for slot in slots].count(READY) == len(slots)

    def pin(self, slots: list[int], pins: list[int]) -> None:
        """Each is held and in `pins` before Ctrl-C can come."""
        for slot in slots:
            self.holds[slot] += 1
            pins.append(slot)

    def unpin(self, pins: list[int]) -> None:
        """Hold none of them any more."""
        while pins:  # no call stands between the two statements, so Ctrl-C cannot either
            self.holds[pins[-1]] -= 1
            del pins[-1]

    def split(self, slots: list[int]) -> tuple[list[int], list[bool], list[int]]:
        """Of an expert's `slots` each: those to hold, which of these are LOADING, places of others.

        An expert whose read failed is nowhere then. Another lease may still hold its slot.
        """
        held, loading, missing = [], [], []
        for place, slot in enumerate(slots):
            state = self.words[slot]
            if state in (READY, LOADING):
                held.append(slot)
                loading.append(state == LOADING)
                continue
            if state == FAILED:
                self.where[self.owners[slot]] = NOWHERE
            missing.append(place)
        return held, loading, missing

    def in_vain(self, slots: list[int], first: int, stop: int, wanted: list[int]) -> list[int]:
        """Those of `slots`, ascending, that are read into for a key of the range not `wanted`."""
        found = set()
        for slot in slots:
            if self.words[slot] == LOADING and not self.holds[slot]:
                key = self.owners[slot]
                if first <= key < stop and key not in wanted:
                    found.add(slot)
        return sorted(found)

    def idle(self, ranges: SlotRanges, row: int) -> Room:
        """Idle slots for records of a layer, and whose they are; what failed is nobody's."""
        slots = ranges.idle(row, self.leases)
        failed = self._states[slots] == FAILED
        if failed.any():
            self.vacate(slots[failed].tolist())
        return slots, self.key_of[slots]

    def vacate(self, slots: list[int]) -> None:
        """Make slots EMPTY and their experts homeless, unless those live elsewhere by now."""
        for slot in slots:
            self.disown(slot)
            self.ahead.drop(slot, self.words[slot] == FAILED)
            self.words[slot] = EMPTY

    def disown(self, slot: int) -> None:
        """Whoever was in the slot is not there."""
        key = self.owners[slot]
        if key == NOWHERE:
            return
        if self.where[key] == slot:
            self.where[key] = NOWHERE
        self.owners[slot] = NOWHERE
