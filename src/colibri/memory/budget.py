"""How much memory the program may use, and how much it does use."""

from __future__ import annotations

import sys
from pathlib import Path

from colibri.errors import BudgetError
from colibri.memory.system import cgroup_limit, cgroup_room, kilobyte_fields, malloc_trim

__all__ = [
    "available_bytes",
    "machine_bytes",
    "malloc_trim",
    "peak_rss",
    "process_rss",
    "usable_bytes",
]

_STATUS = Path("/proc/self/status")
_RESERVE_SHARE = 20  # one part in so many of what is free stays free,
_LEAST_RESERVE, _MOST_RESERVE = 128 << 20, 1 << 30  # within these bounds


def usable_bytes(process_bytes: int) -> int:
    """The bound on the program's resident memory where no `ram` is set.

    It is what the program occupies now, at most `process_bytes`, and what cgroup and machine still
    leave, less a reserve of 5 % (128 MiB to 1 GiB).

    Raises:
        BudgetError: the system does not tell.
    """
    free = available_bytes()
    reserve = min(max(free // _RESERVE_SHARE, _LEAST_RESERVE), _MOST_RESERVE)
    return max(0, min(process_bytes, process_rss()) + free - reserve)


def available_bytes() -> int:
    """What can still be allocated without swapping: MemAvailable, or less where a cgroup says so.

    Raises:
        BudgetError: the system does not tell.
    """
    machine = kilobyte_fields(Path("/proc/meminfo")).get("MemAvailable")
    rooms = [room for room in (machine, cgroup_room()) if room is not None]
    if not rooms:
        raise BudgetError("this system does not tell how much memory is free: set `ram`")
    return min(rooms)


def machine_bytes() -> int | None:
    """All memory of the machine, or of the tightest cgroup; None where the system does not tell."""
    sizes = (kilobyte_fields(Path("/proc/meminfo")).get("MemTotal"), cgroup_limit())
    return min((size for size in sizes if size is not None), default=None)


def process_rss() -> int:
    """Resident bytes of this process (VmRSS); where /proc is missing, its peak."""
    return kilobyte_fields(_STATUS).get("VmRSS") or peak_rss()


def peak_rss() -> int:
    """The most that this process ever had resident, in bytes (VmHWM)."""
    peak = kilobyte_fields(_STATUS).get("VmHWM")
    if peak is not None:
        return peak
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
