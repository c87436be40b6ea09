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
