"""`coli bench` end to end, on so little memory that it says itself: not a measurement."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.lab.envelope import NOT_A_MEASUREMENT

TINY = [
    *("--shape", "64x128", "--working-set", "4MB", "--pairs", "2", "--positions", "64"),
    *("--threads", "1", "--format", "int4-g64"),
]


def coli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], prog_name="coli")


def test_kernels_for_machines() -> None:
    result = coli("kernels", "--quick", "--json", *TINY, "--activations", "int8", "--n", "2")
    assert result.exit_code == NOT_A_MEASUREMENT
    assert "coli: not a measurement: a working set of 4,000,000 bytes" in result.stderr
    report = json.loads(result.stdout)
    assert list(report)[:6] == ["schema", "commit", "machine", "settings", "ceilings", "results"]
    assert report["settings"]["pairs"] == 2
    matrices = [row for row in report["results"] if row["op"] == "matrix"]
    assert {(row["activations"], row["n"]) for row in matrices} == {("int8", 2)}
    assert len(report["not_a_measurement"]) >= 2


def test_kernels_for_people() -> None:
    result = coli("kernels", "--quick", *TINY, "--op", "matrix", "--isa", "generic")
    assert result.exit_code == NOT_A_MEASUREMENT
    for part in ("int4-g64", "int16", "64x128", "128x64", "all shapes", "limit: "):
        assert part in result.stdout
    assert "moe_step" not in result.stdout


def test_call(tiny: Path) -> None:
    result = coli("call", "--model", str(tiny), "--steps", "2", "--threads", "1")
    assert result.exit_code == NOT_A_MEASUREMENT
    assert "Python's share" in result.stdout
    report = json.loads(
        coli("call", "--json", "--model", str(tiny), "--steps", "2", "--threads", "1").stdout
    )
    assert report["results"][0]["model"] == str(tiny)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--op", "magic"], 2, "known are matrix, moe_step, attention"),
        (["--shape", "huge"], 2, "768x2048"),
        (["--format", "int5"], 3, "unknown weight format"),
        (["--working-set", "much"], 2, "a size such as"),
        (["--peer", "nowhere.so"], 2, "benchmarks/README.md"),
        (["--isa", "quantum"], 2, "does not run here"),
        (["--kernels", "reference"], 2, "only native kernels are measured"),
        (["--working-set", "900TB"], 4, "of memory are free"),
        (["--working-set", "1MB", "--op", "matrix"], 2, "holds 0 int4-g64 matrices"),
        (["--working-set", "9MB", "--op", "moe_step"], 2, "holds 3 experts, and 8 are needed"),
    ],
)
def test_refusals(arguments: list[str], code: int, message: str) -> None:
    result = coli("kernels", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
