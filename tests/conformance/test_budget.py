"""The memory budget is never exceeded: peak RSS of whole runs, in three budgets.

They run on a checkpoint of 1 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colibri.models.generate import generate, shape_config
from tests.tiny import PLAIN

BUDGETS_MIB = (320, 560, 1200)
PROMPT = "The hummingbird drinks while it flies, " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated checkpoint of 1 GB."""
    path = tmp_path_factory.mktemp("budget") / "model"
    generate(path, shape_config(PLAIN, "1gb"), experts="int4-g64")
    return path


def run(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`coli run` in a process of its own, so that its peak is its own."""
    command = [sys.executable, "-m", "colibri", "run", PROMPT, "--model", str(model), "--json"]
    return subprocess.run(
        [*command, "--max-tokens", "12", "--ignore-eos", *flags],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("mib", BUDGETS_MIB)
def test_peak_rss_stays_within_the_budget(model: Path, mib: int) -> None:
    done = run(model, "--ram", f"{mib}MiB")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ram_budget_bytes"] == mib << 20
    assert report["peak_rss_bytes"] <= report["ram_budget_bytes"]
    assert report["completion_tokens"] == 12
    assert report["expert_requests"] >= report["expert_hits"]


def test_a_budget_too_small_says_what_would_fit(model: Path) -> None:
    refused = run(model, "--ram", "150MiB")
    assert refused.returncode == 4
    assert "too small by" in refused.stderr
    assert "Traceback" not in refused.stderr
