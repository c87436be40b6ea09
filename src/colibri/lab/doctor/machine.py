"""The processor, memory and limits of this machine, as far as /proc and /sys tell.

Every check takes a `System`, whose root may be a folder that looks like another machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri.kernels.cpus import affinity_cpus, cgroup_cpus
from colibri.lab.doctor.finding import Finding, fault, fine, note, slow
from colibri.lab.machine import cpu_name
from colibri.memory.numa import find_placement
from colibri.memory.system import cgroup_limit, cgroup_room, kilobyte_fields
from colibri.units import format_bytes

LEAST_RAM = 1 << 30  # below it hardly any published model runs
_FEW_FILES = 1024  # descriptors; large checkpoints have some hundred shards
_SWAPPED = 64 << 20  # of this process's memory
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")


def _open_files() -> int | None:
    with suppress(ImportError, OSError):
        import resource  # POSIX only

        return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Where facts about the machine come from.

    Attributes:
        root: where /proc and /sys are looked for.
        architecture: `x86_64`, `aarch64`, …
        num_cpus: processors of the machine.
        usable_cpus: those that the affinity mask leaves.
        open_files: descriptors that a process may have.
    """

    root: Path = Path("/")
    architecture: str = field(default_factory=platform.machine)
    num_cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    usable_cpus: int = field(default_factory=affinity_cpus)
    open_files: int | None = field(default_factory=_open_files)

    def read(self, path: str) -> str:
        """A file below the root, without blanks at its ends; empty where there is none."""
        with suppress(OSError):
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    @property
    def cpu_flags(self) -> frozenset[str]:
        """What /proc/cpuinfo says that the processor can do."""
        for line in self.read("proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
        return frozenset()


def machine_findings(system: System) -> Iterator[Finding]:
    """All checks of this module."""
    yield check_processor(system)
    yield check_cores(system)
    yield check_memory(system)
    yield check_swap(system)
    yield check_huge_pages(system)
    yield check_files(system)
    yield from check_container(system)
    yield from check_nodes(system)


def check_processor(system: System) -> Finding:
    """Which of the kernels' instruction sets the processor has."""
    flags, name = system.cpu_flags, cpu_name(system.root / "proc/cpuinfo") or system.architecture
    known = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
        "avx-vnni": {"avx_vnni"},
        "avx2": {"avx2", "fma", "f16c"},
        "neon-dotprod": {"asimddp"},
    }
    there = [each for each, needed in known.items() if needed <= flags]
    facts: dict[str, Any] = {"cpu": name, "architecture": system.architecture}
    facts["instruction_sets"] = there
    if there:
        return fine("processor", f"{name}: {', '.join(there)}", **facts)
    if not flags:
        return note("processor", f"{name}: its features are not told", "", **facts)
    wanted = "asimddp" if system.architecture == "aarch64" else "avx2, fma and f16c"
    return slow(
        "processor",
        f"{name}: no {wanted}",
        "the generic kernels compute the same bits many times slower",
        "run on a processor with AVX2 (2013 or later) or ARMv8.2 with dot products; in a virtual "
        "machine pass the host's processor through",
        **facts,
    )


def check_cores(system: System) -> Finding:
    """How many threads may run at once, and what keeps others away."""
    quota = cgroup_cpus(system.root / "sys/fs/cgroup", system.root / "proc/self/cgroup")
    usable = system.usable_cpus if quota is None else max(1, min(system.usable_cpus, quota))
    facts = {"cpus": system.num_cpus, "affinity": system.usable_cpus, "quota": quota}
    if usable >= system.num_cpus:
        return fine("cores", f"all {system.num_cpus}", **facts, usable=usable)
    by_quota = quota is not None and quota < system.usable_cpus
    why = "a control group's quota" if by_quota else "the affinity mask"
    return slow(
        "cores",
        f"{usable} of {system.num_cpus}: {why} leaves no more",
        "compute-bound work is that much slower; reading from disk is not",
        "raise the container's CPU limit" if by_quota else "start it without taskset or cpuset",
        **facts,
        usable=usable,
    )


def check_memory(system: System) -> Finding:
    """What the program may have: machine and control groups together."""
    fields = kilobyte_fields(system.root / "proc/meminfo")
    total, free = fields.get("MemTotal"), fields.get("MemAvailable")
    limit, room = cgroup_limit(system.root), cgroup_room(system.root)
    facts = {"total_bytes": total, "available_bytes": free, "cgroup_limit_bytes": limit}
    if total is None or free is None:
        return note(
            "memory", "this system does not tell", "the budget cannot be found", "set --ram"
        )
    least = min(size for size in (free, room) if size is not None)
    shown = f"{format_bytes(least)} free of {format_bytes(total)}"
    if limit is not None and limit < total:
        shown += f", a control group allows {format_bytes(limit)}"
    if least < LEAST_RAM:
        bound = limit is not None and (room or 0) <= free
        return fault(
            "memory",
            shown,
            "only small models run; what does not fit is refused before anything is loaded",
            "raise the container's memory limit" if bound else "end programs that hold memory",
            **facts,
        )
    return fine("memory", shown, **facts)


def check_swap(system: System) -> Finding:
    """Swap is harmless until this process's memory is in it."""
    fields = kilobyte_fields(system.root / "proc/meminfo")
    total, free = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    own = kilobyte_fields(system.root / "proc/self/status").get("VmSwap", 0)
    facts = {"total_bytes": total, "used_bytes": total - free, "own_bytes": own}
    if own > _SWAPPED or (total and total - free > total // 2):
        return slow(
            "swap",
            f"{format_bytes(total - free)} of {format_bytes(total)} in use",
            "the machine is short of memory: weights that are swapped out are read twice",
            "lower --ram, or end programs that hold memory",
            **facts,
        )
    return fine("swap", "none" if not total else f"{format_bytes(total)}, hardly used", **facts)


def check_huge_pages(system: System) -> Finding:
    """Direct reads into huge pages cost half the processor time of those into small ones."""
    text = system.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return fine("huge pages", chosen, enabled=chosen)
    if not chosen:
        return note(
            "huge pages", "this system does not tell", "slots lie in small pages", enabled=None
        )
    return slow(
        "huge pages",
        chosen,
        "slots lie in small pages: reads take more of the processor, and may be half as fast",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        enabled=chosen,
    )


def check_files(system: System) -> Finding:
    """Each shard of a model, and each connection of a server, takes a descriptor."""
    limit = system.open_files
    if limit is None or limit >= _FEW_FILES:
        return fine("open files", "enough" if limit is None else f"{limit:,}", limit=limit)
    return slow(
        "open files",
        f"{limit:,} at most",
        "models of many shards, or servers of many connections, may run out of them",
        "ulimit -n 4096",
        limit=limit,
    )


def check_container(system: System) -> Iterator[Finding]:
    """Whether this is a container, whose limits are those above."""
    if any((system.root / mark).exists() for mark in _CONTAINER_MARKS):
        yield note(
            "container",
            "runs in one",
            "its limits of memory and processors are heeded; mount the model as a volume, since "
            "reads through an overlay are slower",
        )


def check_nodes(system: System) -> Iterator[Finding]:
    """Several memory nodes: how slots are spread."""
    placement = find_placement(system.root)
    if placement is not None:
        yield fine("memory nodes", f"slots are {placement}", placement=str(placement))
