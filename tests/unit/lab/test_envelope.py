import json
import subprocess
from pathlib import Path

import pytest

from colibri.lab import machine
from colibri.lab.envelope import Envelope, commit_of

KEYS = ["schema", "commit", "machine", "settings", "ceilings", "results"]


def envelope(*reasons: str) -> Envelope:
    return Envelope(
        schema="colibri.bench.test/1",
        settings={"threads": 2},
        ceilings={"dram_read_bytes_per_s": 3e10},
        results=[{"op": "matrix"}],
        reasons=reasons,
    )


def test_keys() -> None:
    shown = json.loads(json.dumps(envelope().as_dict()))
    assert list(shown) == KEYS
    assert shown["schema"] == "colibri.bench.test/1"
    assert shown["results"] == [{"op": "matrix"}]
    assert {"cpu", "num_cpus", "cpu_mask", "memory_bytes", "load_average"} <= set(shown["machine"])


def test_reasons_are_told() -> None:
    assert envelope("too small").as_dict()["not_a_measurement"] == ["too small"]


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # we are in one ourselves
    package = tmp_path / "src" / "colibri"
    package.mkdir(parents=True)
    assert commit_of(package) is None
    (tmp_path / "pyproject.toml").write_text("")
    assert commit_of(package) is None
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = commit_of(package)
    assert commit is not None
    assert len(commit) == 12
    (tmp_path / "pyproject.toml").write_text("changed")
    assert commit_of(package) == f"{commit}-dirty"


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Fast One\nmodel name\t: Another\n")
    assert machine.cpu_name(info) == "Fast One"


def test_last_level_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "512K", "32768K")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    assert machine.last_level_cache(tmp_path) == 32 << 20
    assert machine.last_level_cache(tmp_path / "nowhere") is None
