"""`coli sim`, and the traces and heat that `coli run` leaves for it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.lab.sim import POLICIES

pytestmark = pytest.mark.usefixtures("heat_on")


def coli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="coli")


@pytest.fixture(scope="module")
def trace(heat_on: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim") / "routes.jsonl"
    flags = ("--model", str(tiny), "--max-tokens", "24", "--ignore-eos")
    result = coli("run", "a bird " * 8, *flags, "--route-trace", str(path))
    assert result.exit_code == 0, result.output
    return path


def test_json(trace: Path) -> None:
    result = coli("sim", str(trace), str(trace), "--json", "--capacity", "50%")
    found = json.loads(result.stdout)
    assert found["traces"] == [str(trace)] * 2
    assert [score["policy"] for score in found["scores"]] == list(POLICIES)
    rates = {score["policy"]: score["hit_rate"] for score in found["scores"]}
    assert rates["belady"] >= rates["mixed"] > 0
    assert all(s["bytes_read"] > 0 for s in found["scores"])


def test_for_people(trace: Path) -> None:
    text = coli("sim", str(trace)).stdout
    for part in (*POLICIES, "12.5%", "75.0%", "of the gap", "KiB", "hits, 0 to 100 %", "B|"[:1]):
        assert part in text
    assert sum(line.endswith("|") for line in text.splitlines()) == 5


def test_the_whole_passes(trace: Path) -> None:
    by_token, by_pass = (
        json.loads(coli("sim", str(trace), "--json", "--steps", steps, "--capacity", "100%").stdout)
        for steps in ("token", "pass")
    )
    assert by_pass["scores"][0]["requests"] <= by_token["scores"][0]["requests"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "nowhere: No such file or directory: name a file of --route-trace"),
        (["TRACE", "--capacity", "few"], "--capacity is few: give a number of experts"),
        (["TRACE", "--capacity", "900%"], "--capacity is 900%, but the model has"),
        ([__file__], "is no route trace (written by --route-trace)"),
        (["TRACE", "--capacity", "1"], "experts are needed at once"),
    ],
)
def test_refusals(trace: Path, flags: list[str], message: str) -> None:
    result = coli("sim", *(str(trace) if flag == "TRACE" else flag for flag in flags))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_heat_is_kept_and_a_foreign_file_is_told(tiny: Path, trace: Path) -> None:
    heat = tiny / ".coli_usage"
    before = heat.read_text()
    assert before.startswith("# colibri usage 1 ")
    heat.write_text(before.replace("usage 1 ", "usage 1 9"))
    try:
        result = coli("run", "hi", "--model", str(tiny), "--max-tokens", "2")
    finally:
        heat.write_text(before)
    assert result.exit_code == 0
    assert result.stderr.count("belongs to another model") == 1
