"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from colibri.kernels.cpus import affinity_mask, num_threads
from colibri.memory.system import kilobyte_fields
from colibri.units import parse_bytes

_CPU_INFO, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_STAT = Path("/proc/stat")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def machine_facts() -> dict[str, Any]:
    """Processor, caches, memory and how busy it all was; None where the system does not tell."""
    return {
        "cpu": cpu_name(_CPU_INFO),
        "architecture": platform.machine(),
        "num_cpus": os.cpu_count(),
        "cpu_mask": affinity_mask(),
        "num_usable_cpus": num_threads(),
        "last_level_cache_bytes": last_level_cache(_CACHES),
        "memory_bytes": kilobyte_fields(_MEMORY).get("MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": load_average(),
    }


def cpu_name(info: Path) -> str | None:
    """The first `model name` of /proc/cpuinfo, else what Python knows."""
    with suppress(OSError):
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def last_level_cache(caches: Path) -> int | None:
    """Bytes of the largest cache that the first processor sees."""
    sizes = []
    for file in caches.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(parse_bytes(file.read_text(encoding="ascii").strip()))
    return max(sizes, default=None)


def load_average() -> float | None:
    """Processes that wanted to run in the last minute."""
    with suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


class OtherLoad:
    """How much of the processors went to anybody else since this was made."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = self._now()

    def share(self) -> float | None:
        """Busy time of others, and time stolen, over all time; None where it is not told."""
        now = self._now()
        if now is None or self._before is None:
            return None
        busy, total, own = (b - a for a, b in zip(self._before, now, strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else None

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds busy and in all, of all processors, and those of this process."""
        with suppress(OSError, ValueError, IndexError):
            words = self._stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
            idle = ticks[3] + ticks[4]  # idle, and idle while a disk works
            mine = os.times()
            return sum(ticks) - idle, sum(ticks), mine.user + mine.system
        return None
