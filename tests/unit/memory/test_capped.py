"""A memory cap that gets tighter while a store fills: slots give way, nobody is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20

SCRIPT = """
import os, pathlib, sys
import numpy as np
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.null import NullReader
from colibri.memory.pressure import Pressure, sample_memory
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index

MIB, EXPERTS = 1 << 20, 128
group = pathlib.Path(sys.argv[1])
(group / "cgroup.procs").write_text(str(os.getpid()))
index = bare_index([512], EXPERTS)  # records of 2 MiB
arena = Arena([found.slot_nbytes for found in slot_classes(index)], [EXPERTS])
store = ExpertStore(index, arena, LRU(EXPERTS), NullReader(arena), 2)
limit = 320 * MIB  # what the process had before it came here is not counted
(group / "memory.limit_in_bytes").write_text(str(limit))
now = [0.0]
pressure = Pressure(store, 16 * MIB, sample_memory, lambda: now[0])
assert store.num_usable == EXPERTS, store.num_usable
for turn in range(3 * EXPERTS):
    if turn == 60:  # 120 of 256 MiB are taken; now there is room for fewer than 40 further
        (group / "memory.limit_in_bytes").write_text(str(limit - 120 * MIB))
    now[0] += 1
    pressure.poll()
    with store.lease(0, np.array([turn % EXPERTS], np.int32)) as slots:
        slot = int(slots[0])
        store.table.wait(slot)
        start = int(arena.bases[slot])
        arena.data[start : start + 2 * MIB] = turn % 251 + 1
assert 60 <= store.num_usable < 100, store.num_usable
peak = int((group / "memory.max_usage_in_bytes").read_text())
assert peak <= limit, (peak, limit)
print("alive")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    made = MOUNT / f"colibri-test.{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"the memory cgroup (version 1) cannot be written here: {error.strerror}")
    yield made
    made.rmdir()


def test_a_cap_lowered_while_running(group: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(group)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "alive\n", (result.returncode, result.stderr)
