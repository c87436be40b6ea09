"""`coli bench serve` on a model so small that it says so."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.bench_serve import load_table, plot
from colibri.cli.main import app
from colibri.lab.envelope import NOT_A_MEASUREMENT

FEW = ["--pairs", "1", "--duration", "1", "--tokens", "16", "--threads", "1"]


def coli(cache: Path, model: Path, *arguments: str) -> Result:
    command = ["bench", "serve", *arguments, "--model", str(model), "--cache-dir", str(cache)]
    return CliRunner().invoke(app, command, prog_name="coli")


def test_clients_in_a_table_a_file_and_for_machines(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    asked = ["--figure", "load", "--sessions", "2", "--context", "24", "--csv", str(file)]
    result = coli(tmp_path, tiny, *asked, *FEW, "--json")
    assert result.exit_code == NOT_A_MEASUREMENT, result.stderr
    report = json.loads(result.stdout)
    assert report["schema"] == "colibri.bench.serve/1"
    (row,) = report["results"]
    told = row["details"]
    assert (told["sessions"], told["context"]) == (2, 24)
    assert row["value"] == told["tokens"] / told["seconds"] > 0
    assert told["replies"] > 0
    assert 0 < told["between_s_p50"] <= told["between_s_p99"]
    assert 0 < told["ttft_s_p50"] <= told["ttft_s_p99"]
    assert min(told["rss_bytes"], told["server_s_per_token"], told["engine_s_per_token"]) > 0
    (written,) = csv.DictReader(file.read_text().splitlines())
    assert float(written["tokens_per_s"]) == row["value"]
    assert written["rss_bytes"] == str(told["rss_bytes"])
    assert load_table([row]).row_count == 1
    assert "2 x 24 |#####" in plot([row])


def test_replies_that_are_decoded_together(tiny: Path, tmp_path: Path) -> None:
    figures = ["--figure", "n", "--figure", "together_memory"]
    result = coli(tmp_path, tiny, *figures, *FEW, "--json")
    assert result.exit_code == NOT_A_MEASUREMENT, result.stderr
    rows = {row["figure"]: row for row in json.loads(result.stdout)["results"]}
    assert list(rows) == ["together_memory", "n_prompt", "n_io", "n_gain"]
    assert (rows["n_prompt"]["value"], rows["n_prompt"]["holds"]) == (1.0, True)
    for name in ("together_memory", "n_io"):
        assert rows[name]["value"] > 0
        assert rows[name]["details"]["kernels_s"] > 0
        assert rows[name]["details"]["experts_of_a_step"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "magic"], "known are load, stall, one_thread, two_threads, server_share"),
        (["--sessions", "1,two"], "--sessions 1,two: write numbers with commas"),
        (["--context", "0"], "--context 0: write numbers with commas"),
    ],
)
def test_refusals(tiny: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = coli(tmp_path, tiny, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
