"""Gives slots back when memory gets short, and takes them again when it has long been plentiful.

Short means: less is left than a floor, once everything that the program may still touch is counted;
or the system stalls for memory, or a cgroup hits its limit, while little is left. So the program is
never killed by its own growth, and makes room for others' in steps.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from colibri.memory.system import cgroup_room, cgroups, kilobyte_fields, read_number, stall_s
from colibri.units import format_bytes

CALM_S = 600.0  # without pressure until slots are taken back
INTERVAL_S = 1.0  # between two looks while tokens are computed,
IDLE_INTERVAL_S = 5.0  # and while none are
_STEPS = 16  # a step is so much of all slots
_STALLED = 0.1  # share of the time
_LEAST_FLOOR, _MOST_FLOOR, _FLOOR_SHARE = 64 << 20, 512 << 20, 40
_NEARLY_SHORT = 4  # floors: with more than that left, stalls are somebody else's

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The state of memory now.

    Attributes:
        available: bytes that can still be allocated; None where the system does not tell.
        stall_s: seconds that some task waited for memory, since the system started.
        limit_hits: how often the program's cgroup ran into its limit.
    """

    available: int | None
    stall_s: float = 0.0
    limit_hits: int = 0


class Shrinkable(Protocol):
    """What gives memory back: the expert store."""

    def retire(self, nbytes: int) -> int:
        """Give back about `nbytes`; how many slots went."""

    def take_back(self, nbytes: int) -> None:
        """Use slots of at most `nbytes` again."""

    @property
    def slots_bytes(self) -> int:
        """Of all slots, retired ones included."""

    @property
    def retired_bytes(self) -> int:
        """Of those that are retired."""

    @property
    def untouched_bytes(self) -> int:
        """What usable slots will take when records land in them for the first time."""


class WatchedStore(Shrinkable, Protocol):
    """A store that says when a step begins."""

    between_tokens: Callable[[], None]


def sample_memory(root: Path = Path("/")) -> MemorySample:
    """Look at /proc and the program's cgroup; `root` is where /proc and /sys are looked for."""
    machine = kilobyte_fields(root / "proc/meminfo").get("MemAvailable")
    rooms = [room for room in (machine, cgroup_room(root)) if room is not None]
    stalls, hits = [stall_s(root / "proc/pressure/memory")], 0
    for group in cgroups(root):
        stalls.append(stall_s(group / "memory.pressure"))
        hits += read_number(group / "memory.failcnt") + sum(
            read_number(group / "memory.events", name) for name in ("high", "max", "oom")
        )
    return MemorySample(min(rooms, default=None), max(stalls), hits)


def floor_of(available: int) -> int:
    """Bytes that stay free where so many are `available` at the start."""
    return min(max(available // _FLOOR_SHARE, _LEAST_FLOOR), _MOST_FLOOR)


def watch_memory(store: WatchedStore) -> Watch:
    """Watch memory for a store from now on, before each of its steps and while it is idle.

    What stays free is 1/40 of what is available now, 64 to 512 MiB: half of what a plan reserves.
    """
    available = sample_memory().available or 0
    pressure = Pressure(store, floor_of(available))
    store.between_tokens = pressure.poll
    return Watch(pressure)


class Pressure:
    """Watches memory on behalf of one store.

    `poll` may be called as often as one likes, from any thread: it looks at most once in a while,
    and never waits for another thread's look.
    """

    def __init__(
        self,
        store: Shrinkable,
        floor: int,
        sample: Callable[[], MemorySample] = sample_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floor` bytes stay free. Looks for the first time."""
        self._store, self._floor, self._sample, self._clock = store, floor, sample, clock
        self._looking = threading.Lock()
        self._last = sample()
        self._looked = self._calm_since = clock()
        self._look(self._last, 1.0)

    def poll(self, interval_s: float = INTERVAL_S) -> None:
        """Look at memory if the last look is `interval_s` old, and act."""
        now = self._clock()
        elapsed = now - self._looked
        if elapsed < interval_s or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = now
            found = self._sample()
            self._look(found, elapsed)
            self._last = found
        finally:
            self._looking.release()

    def _look(self, found: MemorySample, elapsed: float) -> None:
        if found.available is None:
            return
        step = -(-self._store.slots_bytes // _STEPS)
        headroom = found.available - self._store.untouched_bytes - self._floor
        wanted = max(0, -headroom)
        if self._stalled(found, elapsed):
            wanted = max(wanted, step)
        if wanted:
            self._retire(wanted)
        elif self._clock() - self._calm_since >= CALM_S and self._store.retired_bytes:
            more = min(step, headroom)
            if more > 0:
                self._store.take_back(more)

    def _stalled(self, found: MemorySample, elapsed: float) -> bool:
        assert found.available is not None
        if found.available >= _NEARLY_SHORT * self._floor:
            return False
        waited = (found.stall_s - self._last.stall_s) / max(elapsed, 1e-3)
        return waited > _STALLED or found.limit_hits > self._last.limit_hits

    def _retire(self, wanted: int) -> None:
        begins = not self._store.retired_bytes
        self._calm_since = self._clock()
        if self._store.retire(wanted) and begins:
            _log.warning(
                "memory is short: %s of expert slots are given back, and taken again after %d calm "
                "minutes; set a smaller `ram` to avoid it",
                format_bytes(self._store.retired_bytes),
                CALM_S // 60,
            )


class Watch:
    """Polls while nobody computes; a thread that sleeps almost all of the time."""

    def __init__(self, pressure: Pressure) -> None:
        self._stop = threading.Event()
        watched = weakref.ref(pressure)
        self._thread = threading.Thread(
            target=_watch, args=(watched, self._stop), name="colibri-memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def _watch(watched: weakref.ref[Pressure], stop: threading.Event) -> None:
    while not stop.wait(IDLE_INTERVAL_S):
        pressure = watched()
        if pressure is None:
            return
        pressure.poll(IDLE_INTERVAL_S)
