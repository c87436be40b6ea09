"""Commands over a real checkpoint, in this process."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.models.registry import get_family


def coli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="coli")


def test_plan(tiny: Path) -> None:
    plan = json.loads(coli("plan", str(tiny), "--expert-slots", "50%", "--json").stdout)
    assert plan["num_slots"] == plan["num_experts"] // 2
    shares = [
        *("process_bytes", "dense_bytes", "workspace_bytes", "kv_bytes"),
        *("slots_bytes", "spare_bytes"),
    ]
    assert sum(plan[share] for share in shares) == plan["budget_bytes"]


def test_plan_for_people(tiny: Path) -> None:
    text = coli("plan", str(tiny), "--expert-slots", "50%").stdout
    assert "More expert_slots would fit" in text
    assert "budget" in text
    assert "All experts stay in memory" in coli("plan", str(tiny)).stdout


def test_info(tiny: Path) -> None:
    facts = json.loads(coli("info", str(tiny), "--json").stdout)
    assert get_family(facts["family"]).model_type == facts["family"]
    assert 0 < facts["num_active_parameters"] < facts["num_parameters"]
    assert facts["chat_template"] is True
    text = coli("info", "--model", str(tiny)).stdout
    for part in (facts["family"], f"{facts['num_experts']} a layer", *facts["formats"]):
        assert part in text


def test_info_shows_what_computes(tiny: Path) -> None:
    arguments = ("info", str(tiny), "--threads", "1", "--isa", "generic")
    facts = json.loads(coli(*arguments, "--json").stdout)
    assert (facts["isa"], facts["threads"]) == ("generic", 1)
    assert f"generic, 1 thread on CPU {facts['cpu_mask']}" in coli(*arguments).stdout
    reference = json.loads(coli("info", str(tiny), "--kernels", "reference", "--json").stdout)
    assert (reference["isa"], reference["threads"]) == (None, None)


@pytest.mark.parametrize("command", ["info", "plan"])
def test_a_model_is_named_once(tiny: Path, command: str) -> None:
    result = coli(command, str(tiny), "--model", "other")
    assert result.exit_code == 2
    assert "two models are named" in result.stderr


@pytest.mark.parametrize("command", ["info", "plan"])
def test_no_such_model(command: str) -> None:
    result = coli(command, "nowhere")
    assert result.exit_code == 3
    assert "nowhere: there is no such directory" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["hi", "--ram", "20MB"], 4, "too small by"),
        (["hi", "--max-tokens", "1000000"], 2, "max_tokens is 1000000, the context holds"),
        (["hi", "--context-length", "1000000"], 2, "context_length = 1000000"),
        (["hi", "--kernels", "reference", "--activations", "int8"], 2, "activations is int8"),
        ([""], 2, "the prompt is empty"),
    ],
)
def test_refusals_of_run(tiny: Path, arguments: list[str], code: int, message: str) -> None:
    result = coli("run", *arguments, "--model", str(tiny))
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
