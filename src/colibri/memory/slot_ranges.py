"""Which slots are in use: under pressure, whole slots at the tail are given back for a while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import LOADING, READY, Ints
from colibri.memory.arena import Arena
from colibri.memory.slot_classes import SlotClass

Slots = NDArray[np.int64]


class SlotRanges:
    """The usable slots of each layer: those of its class, less what is retired at the tail."""

    def __init__(self, classes: Sequence[SlotClass], arena: Arena, active: int) -> None:
        """All are usable. No class ever has fewer than `active`, if it had as many."""
        self._arena, self._classes = arena, classes
        self._stops = [slots.stop for slots in arena.ranges]
        self._least = [min(active, len(slots)) for slots in arena.ranges]
        self._class_of = {row: i for i, found in enumerate(classes) for row in found.layers}

    def __getitem__(self, row: int) -> range:
        """Usable slots for records of a layer, by its row in the index."""
        number = self._class_of[row]
        return range(self._arena.ranges[number].start, self._stops[number])

    def idle(self, row: int, leases: Ints) -> Slots:
        """Those of a layer that are not being written, nor held: `leases [num_slots]` say so."""
        slots = self[row]
        window = slice(slots.start, slots.stop)
        idle = (leases[window] == 0) & (self._arena.states[window] != LOADING)
        found: Slots = idle.nonzero()[0] + slots.start
        return found

    @property
    def num_usable(self) -> int:
        """Slots of all classes that are not retired."""
        pairs = zip(self._stops, self._arena.ranges, strict=True)
        return sum(stop - slots.start for stop, slots in pairs)

    @property
    def retired_bytes(self) -> int:
        """What would be taken back."""
        pairs = zip(self._classes, self._stops, self._arena.ranges, strict=True)
        return sum(c.slot_nbytes * (slots.stop - stop) for c, stop, slots in pairs)

    @property
    def untouched_bytes(self) -> int:
        """What usable slots will still take, because nothing has landed in them yet."""
        self._arena.touched |= self._arena.states >= READY  # reads in the background, too
        return sum(
            found.slot_nbytes * int(np.count_nonzero(~self._arena.touched[slots.start : stop]))
            for found, stop, slots in zip(
                self._classes, self._stops, self._arena.ranges, strict=True
            )
        )

    def states(self, leases: Ints) -> list[dict[str, int]]:
        """What the usable slots of each class are at; `leases [num_slots]` hold each."""
        names = ("empty", "loading", "ready", "failed")
        found = []
        for each, stop, slots in zip(self._classes, self._stops, self._arena.ranges, strict=True):
            window = slice(slots.start, stop)
            counts = np.bincount(self._arena.states[window], minlength=len(names)).tolist()
            leased = int(np.count_nonzero(leases[window]))
            about = {
                "slot_bytes": each.slot_nbytes,
                "usable": stop - slots.start,
                "leased": leased,
            }
            found.append(about | dict(zip(names, counts, strict=True)))
        return found

    def shrink(self, nbytes: int, idle: NDArray[np.bool_]) -> Slots:
        """Retire slots of at least `nbytes` if there are so many, each class giving its share.

        Only slots at the tail that are `idle [num_slots]` go. Returns them.
        """
        spare = [self._spare(number) for number in range(len(self._classes))]
        total = sum(n * found.slot_nbytes for n, found in zip(spare, self._classes, strict=True))
        share = min(1.0, nbytes / total) if total else 0.0
        gone = [self._retire(i, int(np.ceil(share * n)), idle) for i, n in enumerate(spare)]
        return np.concatenate([np.empty(0, np.int64), *gone])

    def _spare(self, number: int) -> int:
        return self._stops[number] - self._arena.ranges[number].start - self._least[number]

    def _retire(self, number: int, wanted: int, idle: NDArray[np.bool_]) -> Slots:
        stop = self._stops[number]
        busy = np.flatnonzero(~idle[stop - wanted : stop])
        if len(busy):  # those below it stay until it is free
            wanted -= int(busy[-1]) + 1
        self._stops[number] = stop - wanted
        return np.arange(stop - wanted, stop)

    def grow(self, nbytes: int) -> None:
        """Take back slots of at most `nbytes` together, each class its share of what it gave."""
        share = min(1.0, nbytes / max(1, self.retired_bytes))
        for number, slots in enumerate(self._arena.ranges):
            self._extend(number, int(share * (slots.stop - self._stops[number])))

    def extend(self, row: int, n: int) -> bool:
        """Take back up to `n` slots for a layer that cannot do without; whether there are any."""
        number = self._class_of[row]
        taken = min(n, self._arena.ranges[number].stop - self._stops[number])
        self._extend(number, taken)
        return taken > 0

    def _extend(self, number: int, n: int) -> None:
        start = self._stops[number]
        self._arena.allow(np.arange(start, start + n))
        self._stops[number] += n
