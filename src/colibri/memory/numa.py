"""Where the slots lie on machines with several memory nodes.

Kernels read every expert from all threads, so slots are interleaved over the nodes that the threads
run on; on one node alone, they are kept there as far as it has room.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from colibri.formats import Bytes
from colibri.kernels.library import Library

_log = logging.getLogger(__name__)


class Mode(IntEnum):
    """Numbers of mbind(2)."""

    PREFERRED = 1
    INTERLEAVE = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes for the slots; one node or none is nothing to decide."""

    mode: Mode
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(map(str, self.nodes))
        if self.mode is Mode.INTERLEAVE:
            return f"interleaved over NUMA nodes {names}"
        return f"on NUMA node {names}, where all threads run, as far as it has room"


def find_placement(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> Placement | None:
    """Decide from the machine's topology; None where there is one node, or none is known.

    Args:
        root: where /sys is looked for.
        cpus: those that threads may run on; by default the process's own.
    """
    nodes = {int(path.name[4:]): path for path in (root / _NODES).glob("node[0-9]*")}
    with_memory = {number: path for number, path in nodes.items() if _has_memory(path)}
    if len(with_memory) < 2 or max(with_memory) >= 64:
        return None
    allowed = _affinity() if cpus is None else cpus
    used = tuple(sorted(n for n, path in with_memory.items() if _cpus(path) & allowed))
    if len(used) == 1:
        return Placement(Mode.PREFERRED, used)
    return Placement(Mode.INTERLEAVE, used or tuple(sorted(with_memory)))


def place(data: Bytes, placement: Placement | None, library: Library | None) -> bool:
    """Ask the system to put the untouched pages of `data` there; whether it will."""
    if placement is None or library is None or not data.size:
        return False
    nodes = sum(1 << number for number in placement.nodes)
    start = library.ffi.from_buffer("uint8_t[]", data)
    error = library.lib.colibri_place_memory(start, data.size, int(placement.mode), nodes)
    if error:
        _log.warning(
            "expert slots cannot be put %s (%s): they lie where the system puts them",
            placement,
            os.strerror(error),
        )
    return not error


_NODES = "sys/devices/system/node"


def _has_memory(node: Path) -> bool:
    """Whether the node has memory: some have processors only."""
    try:
        words = (node / "meminfo").read_text(encoding="ascii").split()
        return int(words[words.index("MemTotal:") + 1]) > 0
    except (OSError, ValueError, IndexError):
        return False


def _cpus(node: Path) -> frozenset[int]:
    """The node's processors: `0-3,8` is 0, 1, 2, 3 and 8."""
    try:
        text = (node / "cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return frozenset()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
