"""`coli doctor`: lines for people, one object for machines, an exit code for CI."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from colibri.cli.doctor import summary
from colibri.cli.main import app


def coli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments, "--port", "0"], prog_name="coli")


def test_for_people(tiny: Path) -> None:
    result = coli(str(tiny))
    assert result.exit_code == 0, result.output
    for check in ("python", "kernels", "processor", "memory", "model", "drive speed", "port"):
        assert f" {check} " in result.stdout
    assert "it works" in result.stdout or "all is well" in result.stdout


def test_for_machines(tiny: Path) -> None:
    told = json.loads(coli(str(tiny), "--json").stdout)
    assert told["schema"] == "colibri.doctor/1"
    assert told["worst"] in ("note", "slow")
    assert {finding["check"] for finding in told["findings"]} >= {"cores", "budget", "file system"}
    assert told["machine"]["num_cpus"]


def test_what_does_not_work_is_told_by_the_exit_code(tmp_path: Path, tiny: Path) -> None:
    result = coli(str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "must be mended" in result.stdout
    assert coli(str(tiny), "--kernels", "reference").exit_code == 0
    assert coli(str(tiny), "--kernels", "reference", "--strict").exit_code == 1


def test_summaries() -> None:
    assert summary(0, 0) == "all is well"
    assert summary(0, 2) == "it works; 2 of these cost speed"
    assert summary(1, 2) == "1 of these must be mended before it works"
