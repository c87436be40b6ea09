"""How many threads this process may really run at once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_threads() -> int:
    """CPUs of the affinity mask, limited by the quotas of the control groups; at least 1."""
    quota = cgroup_cpus(_ROOT, _GROUPS)
    cpus = affinity_cpus()
    return cpus if quota is None else max(1, min(cpus, quota))


def affinity_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def affinity_mask() -> str | None:
    """Numbers of these CPUs as `taskset -c` takes them, such as `0-3,8`; None if not to be had."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = sorted(os.sched_getaffinity(0))
    starts = [cpu for cpu in cpus if cpu - 1 not in cpus]
    ends = [cpu for cpu in cpus if cpu + 1 not in cpus]
    runs = zip(starts, ends, strict=True)
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def cgroup_cpus(root: Path, groups: Path) -> int | None:
    """CPUs that the process's control groups grant, rounded up; None without a limit.

    `groups` lists the groups (/proc/self/cgroup); they and all above them, up to `root`, may limit.
    """
    quotas = [math.ceil(q / p) for q, p in map(_quota, _folders(root, groups)) if q > 0 and p > 0]
    return min(quotas, default=None)


def _folders(root: Path, groups: Path) -> Iterator[Path]:
    """Folders of the CPU controller: of version 2 below `root`, of version 1 below `root/cpu`."""
    lines: list[str] = []
    with suppress(OSError):
        lines = groups.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        folder = top / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def _quota(folder: Path) -> tuple[int, int]:
    """Microseconds of CPU in each period of so many, (0, 0) without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota), int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(quota), int(period)
    return 0, 0
