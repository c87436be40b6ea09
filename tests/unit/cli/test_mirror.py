"""`coli mirror plan | stage | verify`, and runs over what it made."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Coli

Spawn = Callable[..., "subprocess.CompletedProcess[str]"]
IDS = ("--ids", "5 6 7", "--max-tokens", "4", "--expert-slots", "8")


def test_a_mirror_from_plan_to_use(coli: Coli, spawn: Spawn, tiny: Path, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    model = ("--model", str(tiny))
    planned = coli("mirror", "plan", mirror, *model, "--budget", "100KB", "--reserve", "0")
    assert planned.exit_code == 0, planned.output
    assert "more would be copied" in planned.output
    assert not Path(mirror).exists()
    facts = json.loads(coli("mirror", "plan", mirror, *model, "--json").stdout)
    assert facts["num_to_copy"] == facts["num_experts"] == len(facts["experts"])
    few = coli("mirror", "stage", mirror, *model, "--budget", "100KB", "--json")
    assert 0 < json.loads(few.stdout)["num_to_copy"] < facts["num_experts"]
    rest = coli("mirror", "stage", mirror, *model)
    assert f"{facts['num_experts']} of {facts['num_experts']} experts" in rest.stderr
    checked = coli("mirror", "verify", mirror, *model, "--json")
    assert json.loads(checked.stdout)["records"] == facts["num_experts"]
    plain, mirrored = (
        spawn("run", *model, *IDS, "--json", *more) for more in ((), ("--mirror", mirror))
    )
    assert plain.returncode == mirrored.returncode == 0, mirrored.stderr
    answers = [json.loads(result.stdout) for result in (plain, mirrored)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[1]["settings"]["mirror"] == [mirror]
    shown = json.loads(coli("info", str(tiny), "--mirror", mirror, "--json").stdout)
    assert shown["mirrors"] == [{"directory": mirror, "num_experts": facts["num_experts"]}]


def test_failures_are_told(coli: Coli, tiny: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny))
    for arguments, code, message in (
        (("plan", str(tmp_path), "--budget", "much"), 2, "--budget is 'much'"),
        (("verify", str(tmp_path)), 3, "is missing and there is no colibri-mirror.json"),
        (("plan", str(tmp_path), "--budget", "1"), 2, "did you mean 1GiB?"),
        (("verify", str(tmp_path / "none")), 2, "there is no such directory: name a mirror"),
        (("stage", str(tiny)), 3, "it is no partial mirror"),
    ):
        result = coli("mirror", *arguments, *model)
        assert result.exit_code == code, result.output
        assert message in result.stderr.replace("\n", " ")
    refused = coli("info", str(tiny), "--mirror", str(tmp_path / "nowhere"))
    assert refused.exit_code == 2
    assert "there is no such directory" in refused.stderr


def test_info_shows_how_experts_are_read(coli: Coli, tiny: Path) -> None:
    text = coli("info", str(tiny), "--reader-threads", "3", "--read-block", "0").stdout
    assert "direct, 3 at a time, whole (large models are measured at first use)" in " ".join(
        text.split()
    )
    facts = json.loads(coli("info", str(tiny), "--json").stdout)
    assert facts["reader"]["measured"] is False
    assert facts["mirrors"] == []


def test_a_model_is_no_mirror(coli: Coli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri.llm.location.BUNDLED", tiny)
    result = coli("mirror", "plan", str(tiny))
    assert result.exit_code == 2
    assert f"write `coli mirror plan --model {tiny} MIRROR`" in result.stderr
