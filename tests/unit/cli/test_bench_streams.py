"""`coli bench disk | decode | prefill | roofline` on models so small that they say so."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.lab import bench_model
from colibri.lab.envelope import NOT_A_MEASUREMENT

KEYS = {"figure", "regime", "value", "at_least", "interval", "device_bytes", "engine_bytes"}
FEW = ["--pairs", "2", "--tokens", "2", "--warm", "2", "--threads", "1"]


def coli(cache: Path, *arguments: str) -> Result:
    command = ["bench", *arguments, "--cache-dir", str(cache)]
    return CliRunner().invoke(app, command, prog_name="coli")


def rows_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == NOT_A_MEASUREMENT, result.stderr
    assert "coli: not a measurement: the model has" in result.stderr
    report = json.loads(result.stdout)
    assert list(report)[:6] == ["schema", "commit", "machine", "settings", "ceilings", "results"]
    assert {"block", "threads", "direct"} <= set(report["settings"]["reading"])
    for row in report["results"]:
        assert set(row) >= KEYS | {"model_bytes"}
        assert 0 < row["model_bytes"] < 3_000_000_000
    found: list[dict[str, Any]] = report["results"]
    return found


@pytest.mark.parametrize(
    ("command", "figure", "ceilings"),
    [
        ("decode", "io_bound_decode", {"disk_read_bytes_per_s"}),
        ("decode", "hits_85", {"disk_read_bytes_per_s"}),
        ("prefill", "prefill_bytes", set()),
        ("prefill", "append", set()),
        ("roofline", "compute_bound", {"disk_read_bytes_per_s", "dram_read_bytes_per_s"}),
    ],
)
def test_figures_for_machines(
    tiny: Path, tmp_path: Path, command: str, figure: str, ceilings: set[str]
) -> None:
    arguments = [command, "--figure", figure, "--json", "--model", str(tiny), *FEW]
    result = coli(tmp_path, *arguments)
    for row in rows_of(result):
        low, high = row["interval"]
        assert 0 < low <= row["value"] <= high
        assert (row["at_least"] is None) != (row["at_most"] is None)
        assert len(row["rounds"]) == 2
    assert set(json.loads(result.stdout)["ceilings"]) == ceilings


def test_prompts_read_each_expert_once(tiny: Path, tmp_path: Path) -> None:
    arguments = ["prefill", "--figure", "prefill_bytes", "--json", "--model", str(tiny), *FEW]
    (row,) = rows_of(coli(tmp_path, *arguments))
    # Files that were written a moment ago are in the page cache, where the device is not asked.
    assert row["engine_bytes"] > 0
    assert row["value"] <= 1.0


def test_a_profile_of_each_rig(tiny: Path, tmp_path: Path) -> None:
    profile = tmp_path / "trace.json"
    figure = ["decode", "--figure", "hits_85", "--json", "--model", str(tiny), *FEW]
    (row,) = rows_of(coli(tmp_path, *figure, "--profile", str(profile)))
    assert row["engine_bytes"] > 0
    for path in (profile, tmp_path / "trace-2.json"):
        names = {event.get("name") for event in json.loads(path.read_text())}
        assert {"forward", "moe_step", "attention_step"} <= names


def test_a_drive_for_people(tiny: Path, tmp_path: Path) -> None:
    result = coli(tmp_path, "disk", "--model", str(tiny), "--pairs", "2")
    assert result.exit_code == NOT_A_MEASUREMENT
    for part in ("blocks of 256.0 KiB, 1 at a time, direct", "GB/s", "chosen", "limit: "):
        assert part in result.stdout
    assert not (tmp_path / "devices.json").exists()  # nothing is remembered of a small model


def test_figures_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "SHAPE", "tiny")
    result = coli(tmp_path, "roofline", "--figure", "memory_bound", "--quick", *FEW)
    assert result.exit_code == NOT_A_MEASUREMENT
    assert "memory-bound" in result.stdout
    assert "bundled" not in result.stderr
    assert (tmp_path / "models" / "tiny-int4-g64" / "colibri.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["decode", "--figure", "magic"], 2, "known are io_bound_decode, hits_85"),
        (["prefill", "--figure", "hits_85"], 2, "known are prefill_bytes"),
        (["decode", "--kernels", "reference"], 2, "only native kernels are measured"),
        (["roofline", "--replay", "nowhere"], 2, "name a file of --route-trace"),
    ],
)
def test_refusals(
    tiny: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = coli(tmp_path, *arguments, "--model", str(tiny))
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
