"""What the system says about memory, real and made up."""

from pathlib import Path

import numpy as np
import pytest

from colibri.memory import budget
from colibri.memory.budget import available_bytes, peak_rss, process_rss, usable_bytes
from colibri.memory.system import cgroup_limit, cgroup_room, kilobyte_fields

MIB = 1 << 20


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2_group(root: Path, path: str, limit: str, used: int, inactive: int) -> None:
    group = f"sys/fs/cgroup{path}"
    write(root, f"{group}/memory.max", f"{limit}\n")
    write(root, f"{group}/memory.current", f"{used}\n")
    write(root, f"{group}/memory.stat", f"anon 5\ninactive_file {inactive}\n")


def test_version_2_tightest_group_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    v2_group(tmp_path, "/a/b", "max", 10, 0)
    v2_group(tmp_path, "/a", "1000", 700, 200)
    v2_group(tmp_path, "", "9000", 700, 0)
    assert cgroup_room(tmp_path) == 500
    assert cgroup_limit(tmp_path) == 1000


def test_version_2_in_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/not-visible-here\n")
    v2_group(tmp_path, "", "1000", 400, 0)
    assert cgroup_room(tmp_path) == 600


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
    group = "sys/fs/cgroup/memory/x"
    write(tmp_path, f"{group}/memory.limit_in_bytes", "2000\n")
    write(tmp_path, f"{group}/memory.usage_in_bytes", "2500\n")
    write(tmp_path, f"{group}/memory.stat", "inactive_file 1\ntotal_inactive_file 600\n")
    assert cgroup_room(tmp_path) == 100
    assert cgroup_limit(tmp_path) == 2000


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "2500\n")
    assert cgroup_room(tmp_path) is None
    assert cgroup_limit(tmp_path) is None


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_room(tmp_path) is None


def test_fields_in_kilobytes(tmp_path: Path) -> None:
    write(tmp_path, "status", "Name:\tx\nVmRSS:\t  12 kB\nThreads:\t3\n")
    assert kilobyte_fields(tmp_path / "status") == {"VmRSS": 12 * 1024}
    assert kilobyte_fields(tmp_path / "missing") == {}


def test_resident_memory_is_seen() -> None:
    before = process_rss()
    block = np.ones(64 * MIB, np.uint8)
    assert process_rss() - before > 48 * MIB
    assert peak_rss() >= process_rss() - MIB
    assert block.all()


def test_usable_memory_keeps_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() > 0
    monkeypatch.setattr(budget, "process_rss", lambda: 100 * MIB)
    for free, reserve in ((1000 * MIB, 128 * MIB), (10000 * MIB, 500 * MIB), (1 << 40, 1 << 30)):
        monkeypatch.setattr(budget, "available_bytes", lambda free=free: free)
        assert usable_bytes(150 * MIB) == 100 * MIB + free - reserve
        assert usable_bytes(50 * MIB) == 50 * MIB + free - reserve
