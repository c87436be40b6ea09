"""Placement on made-up topologies."""

from pathlib import Path

import numpy as np
import pytest

from colibri.kernels.mapping import Mapping
from colibri.memory.numa import Mode, Placement, find_placement, place
from tests.unit.memory.records import KINDS, library


def topology(root: Path, nodes: dict[int, tuple[str, int]]) -> Path:
    """Nodes with processors and kB of memory."""
    for number, (cpus, memory) in nodes.items():
        node = root / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        text = f"Node {number} MemTotal:   {memory} kB\nNode {number} MemFree: 5 kB\n"
        (node / "meminfo").write_text(text)
    return root


def cpus(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_one_node_is_nothing_to_decide(tmp_path: Path) -> None:
    assert find_placement(topology(tmp_path, {0: ("0-7", 9000)}), cpus(0, 1)) is None
    assert find_placement(tmp_path / "nothing", cpus(0)) is None


@pytest.mark.parametrize(
    ("allowed", "mode", "nodes"),
    [
        (cpus(0, 1, 4, 9), Mode.INTERLEAVE, (0, 1)),
        (cpus(4, 5), Mode.PREFERRED, (1,)),
        (cpus(0, 8), Mode.PREFERRED, (0,)),
        (cpus(99), Mode.INTERLEAVE, (0, 1)),
    ],
)
def test_slots_lie_where_threads_run(
    tmp_path: Path, allowed: frozenset[int], mode: Mode, nodes: tuple[int, ...]
) -> None:
    root = topology(tmp_path, {0: ("0-3,8", 9000), 1: ("4-7,9", 9000), 2: ("", 0)})
    assert find_placement(root, allowed) == Placement(mode, nodes)


def test_placements_say_what_they_are() -> None:
    assert str(Placement(Mode.INTERLEAVE, (0, 1))) == "interleaved over NUMA nodes 0, 1"
    assert "on NUMA node 3" in str(Placement(Mode.PREFERRED, (3,)))


@pytest.mark.skipif("native" not in KINDS, reason="needs the kernel library")
def test_memory_can_be_placed() -> None:
    mapping = Mapping(8 << 20, "a test")
    here = Placement(Mode.INTERLEAVE, (0,))
    place(mapping.data, here, library("native"))  # a sandbox may forbid the call
    mapping.data[:] = 1
    assert mapping.data.sum() == 8 << 20
    assert not place(mapping.data, None, library("native"))
    assert not place(np.empty(0, np.uint8), here, library("native"))
    mapping.close()


@pytest.mark.skipif("native" not in KINDS, reason="needs the kernel library")
def test_a_refusal_is_told(caplog: pytest.LogCaptureFixture) -> None:
    mapping = Mapping(8 << 20, "a test")
    assert not place(mapping.data, Placement(Mode.INTERLEAVE, (61,)), library("native"))
    assert "cannot be put interleaved over NUMA nodes 61" in caplog.text
    mapping.close()
