"""Machines that are not this one, told by folders that look like theirs."""

from pathlib import Path

import pytest

from colibri.lab.doctor.finding import Finding, Grade
from colibri.lab.doctor.machine import (
    System,
    check_container,
    check_cores,
    check_files,
    check_huge_pages,
    check_memory,
    check_nodes,
    check_processor,
    check_swap,
    machine_findings,
)

MEMINFO = {
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n"
    "SwapTotal: 4000000 kB\nSwapFree: 4000000 kB\n"
}
CPU = "model name\t: Some CPU\nflags\t\t: fpu sse2 {}\n"


def faked(root: Path, files: dict[str, str], **others: object) -> System:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sizes = {"architecture": "x86_64", "num_cpus": 8, "usable_cpus": 8, "open_files": 65536}
    return System(root=root, **(sizes | others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "grade", "found"),
    [
        ("avx2 fma f16c", Grade.FINE, "Some CPU: avx2"),
        ("avx2 fma f16c avx_vnni", Grade.FINE, "avx-vnni, avx2"),
        ("avx512f avx512bw avx512vl avx512_vnni avx2 fma f16c", Grade.FINE, "avx512, avx2"),
        ("avx", Grade.SLOW, "no avx2, fma and f16c"),
        ("avx2 fma", Grade.SLOW, "no avx2, fma and f16c"),
    ],
)
def test_processors(tmp_path: Path, flags: str, grade: Grade, found: str) -> None:
    finding = check_processor(faked(tmp_path, {"proc/cpuinfo": CPU.format(flags)}))
    assert finding.grade == grade
    assert found in finding.found
    assert bool(finding.mend) == (grade == Grade.SLOW)


def test_arm(tmp_path: Path) -> None:
    info = "processor: 0\nFeatures\t: fp asimd {}\n"
    new = faked(tmp_path / "a", {"proc/cpuinfo": info.format("asimddp")}, architecture="aarch64")
    old = faked(tmp_path / "b", {"proc/cpuinfo": info.format("")}, architecture="aarch64")
    assert check_processor(new).grade == Grade.FINE
    assert "no asimddp" in check_processor(old).found


def test_cores_that_others_keep(tmp_path: Path) -> None:
    assert check_cores(faked(tmp_path, {})).grade == Grade.FINE
    pinned = check_cores(faked(tmp_path, {}, usable_cpus=2))
    assert pinned.grade == Grade.SLOW
    assert "2 of 8: the affinity mask" in pinned.found
    assert "taskset" in pinned.mend
    groups = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n"}
    capped = check_cores(faked(tmp_path, groups))
    assert "2 of 8: a control group's quota" in capped.found
    assert capped.facts == {"cpus": 8, "affinity": 8, "quota": 2, "usable": 2}


V2 = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/memory.current": "100000000\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "100000000\n",
}
HALF = str(512 << 20)


@pytest.mark.parametrize(
    "groups",
    [
        V2 | {"sys/fs/cgroup/box/memory.max": HALF},
        V1 | {"sys/fs/cgroup/memory/box/memory.limit_in_bytes": HALF},
    ],
    ids=["v2", "v1"],
)
def test_a_group_of_512_mb(tmp_path: Path, groups: dict[str, str]) -> None:
    finding = check_memory(faked(tmp_path, MEMINFO | groups))
    assert finding.grade == Grade.FAULT
    assert "a control group allows 512.0 MiB" in finding.found
    assert "container's memory limit" in finding.mend


def test_memory(tmp_path: Path) -> None:
    enough = check_memory(faked(tmp_path / "a", MEMINFO))
    assert (enough.grade, enough.found) == (Grade.FINE, "11.4 GiB free of 15.3 GiB")
    little = {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 500000 kB\n"}
    short = check_memory(faked(tmp_path / "b", little))
    assert short.grade == Grade.FAULT
    assert "end programs" in short.mend
    assert check_memory(faked(tmp_path / "c", {})).mend == "set --ram"


def test_swap(tmp_path: Path) -> None:
    assert check_swap(faked(tmp_path / "a", MEMINFO)).grade == Grade.FINE
    used = {"proc/meminfo": "SwapTotal: 4000000 kB\nSwapFree: 100000 kB\n"}
    assert check_swap(faked(tmp_path / "b", used)).grade == Grade.SLOW
    own = MEMINFO | {"proc/self/status": "VmSwap: 900000 kB\n"}
    assert "swapped out" in check_swap(faked(tmp_path / "c", own)).consequence
    assert check_swap(faked(tmp_path / "d", {})).found == "none"


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("always [madvise] never", Grade.FINE),
        ("[always] madvise never", Grade.FINE),
        ("always madvise [never]", Grade.SLOW),
        ("", Grade.NOTE),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, grade: Grade) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/enabled": text}
    assert check_huge_pages(faked(tmp_path, files)).grade == grade


def test_open_files(tmp_path: Path) -> None:
    assert check_files(faked(tmp_path, {}, open_files=256)).mend == "ulimit -n 4096"
    assert check_files(faked(tmp_path, {}, open_files=None)).grade == Grade.FINE


def test_containers_and_nodes(tmp_path: Path) -> None:
    plain = faked(tmp_path / "a", {})
    assert [*check_container(plain), *check_nodes(plain)] == []
    (boxed,) = check_container(faked(tmp_path / "b", {".dockerenv": ""}))
    assert boxed.grade == Grade.NOTE


def test_every_finding_that_matters_says_what_to_do(tmp_path: Path) -> None:
    findings: list[Finding] = list(machine_findings(faked(tmp_path, MEMINFO)))
    findings += list(machine_findings(System()))
    for finding in findings:
        assert finding.check
        assert finding.found
        if finding.grade in (Grade.SLOW, Grade.FAULT):
            assert finding.consequence
            assert finding.mend
