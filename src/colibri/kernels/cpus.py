"""How many threads this process may really run at once."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def num_threads() -> int:
    """CPUs of the affinity mask, limited by the quota of the control group; at least 1."""
    quota = cgroup_cpus(_CGROUP)
    cpus = affinity_cpus()
    return cpus if quota is None else max(1, min(cpus, quota))


def affinity_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cpus(root: Path) -> int | None:
    """CPUs that the control group at `root` grants, rounded up; None without a limit."""
    for quota, period in (_quota_v2(root / "cpu.max"), _quota_v1(root / "cpu")):
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return None


def _quota_v2(path: Path) -> tuple[int, int]:
    """`cpu.max` holds "quota period" in microseconds, or "max period"."""
    with suppress(OSError, ValueError):
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota), int(period)
    return 0, 0


def _quota_v1(folder: Path) -> tuple[int, int]:
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(quota), int(period)
    return 0, 0
