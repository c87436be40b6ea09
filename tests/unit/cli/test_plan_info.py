"""Commands over a real checkpoint, in this process."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.models import glm4_moe, inkling_text, qwen4_exp
from colibri.models.registry import get_family
from tests.tiny import write_tiny


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


def test_tables_that_stay_on_disk_are_told(tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path, qwen4_exp.FAMILY))
    plan = json.loads(coli("plan", path, "--json").stdout)
    assert (plan["table_bytes"], plan["table_bytes_per_token"]) == (4 * 12 * (416 + 480), 384)
    assert "stay on disk: a token reads 384" in coli("plan", path).stdout
    facts = json.loads(coli("info", path, "--json").stdout)
    assert facts["table_bytes"] == plan["table_bytes"]
    assert facts["num_parameters"] > 12 * (416 + 480) + facts["num_active_parameters"] - 2 * 48


def test_shared_experts_with_rows_of_the_router_are_no_routed_ones(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, inkling_text.FAMILY)
    assert json.loads(coli("info", str(path), "--json").stdout)["num_experts"] == 16


def test_info(tiny: Path) -> None:
    facts = json.loads(coli("info", str(tiny), "--json").stdout)
    assert get_family(facts["family"]).model_type == facts["family"]
    assert 0 < facts["num_active_parameters"] < facts["num_parameters"]
    assert facts["chat_template"] is True
    text = coli("info", "--model", str(tiny)).stdout
    for part in (facts["family"], f"{facts['num_experts']} a layer", *facts["formats"]):
        assert part in text


def test_info_by_parts(tiny: Path) -> None:
    facts = json.loads(coli("info", str(tiny), "--json").stdout)
    parts = {part["part"]: part for part in facts["parts"]}
    assert {"embedding", "dense", "routed experts"} <= parts.keys()
    assert sum(part["num_parameters"] for part in facts["parts"]) == facts["num_parameters"]
    routed = parts["routed experts"]
    share = facts["num_experts_per_tok"] / facts["num_experts"]
    assert routed["bytes"] == facts["experts_bytes"]
    assert routed["bytes_per_token"] == pytest.approx(share * routed["bytes"])
    assert facts["bytes_per_token"] == sum(part["bytes_per_token"] for part in facts["parts"])
    assert facts["eos_ids"]
    assert facts["missing"] == []
    text = coli("info", str(tiny)).stdout
    assert "routed experts" in text
    assert "a token reads" in text


@pytest.mark.parametrize("converted", [False, True])
def test_info_counts_drafting_heads_apart(converted: bool, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "from", glm4_moe.FAMILY, heads=2)
    if converted:
        coli("convert", str(path), str(tmp_path / "to"))
        path = tmp_path / "to"
    facts = json.loads(coli("info", str(path), "--json").stdout)
    parts = {part["part"]: part for part in facts["parts"]}
    assert parts["drafting heads"]["num_parameters"] > 0
    assert parts["drafting heads"]["num_active_parameters"] == 0
    assert parts["shared experts"]["bytes_per_token"] == parts["shared experts"]["bytes"]
    assert facts["left_aside"].keys() == {"drafting heads"}
    assert ("int8-g64" in parts["drafting heads"]["formats"]) is converted


def test_info_of_a_file(tiny: Path) -> None:
    path = sorted(tiny.glob("*.safetensors"))[0]
    facts = json.loads(coli("info", str(path), "--json").stdout)
    assert (facts["file"], facts["bytes"]) == (str(path), path.stat().st_size)
    assert sum(facts["tensors"].values()) == facts["num_tensors"]
    assert str(facts["num_tensors"]) in coli("info", str(path)).stdout


def test_info_says_what_is_missing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, glm4_moe.FAMILY)
    shard = sorted(path.glob("*.safetensors"))[0]
    shard.unlink()
    result = coli("info", str(path), "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["family"]) == (3, glm4_moe.FAMILY.model_type)
    assert shard.name in facts["missing"][0]
    assert shard.name in coli("info", str(path)).stdout


def test_info_shows_what_computes(tiny: Path) -> None:
    arguments = ("info", str(tiny), "--threads", "1", "--isa", "generic")
    facts = json.loads(coli(*arguments, "--json").stdout)
    assert (facts["isa"], facts["threads"]) == ("generic", 1)
    assert f"generic, 1 thread on CPU {facts['cpu_mask']}" in coli(*arguments).stdout
    reference = json.loads(coli("info", str(tiny), "--kernels", "reference", "--json").stdout)
    assert (reference["isa"], reference["threads"]) == (None, None)


def test_plan_forecasts(tiny: Path, tmp_path: Path) -> None:
    flags = (str(tiny), "--expert-slots", "50%", "--cache-dir", str(tmp_path))
    told = json.loads(coli("plan", *flags, "--json").stdout)
    assert told["ram_budget_bytes"] == told["budget_bytes"]
    assert told["hit_rate_source"] == "typical"
    assert told["bound"] in ("disk", "memory", "overhead")
    for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s"):
        assert 0 < told[name]["low"] < told[name]["value"] < told[name]["high"]
    assert told["probes"]["is_drive_assumed"]
    text = " ".join(coli("plan", *flags, "--hit-rate", "0.9").stdout.split())
    assert "Hit rate 90%, as given" in text
    assert "GB/s, assumed)" in text
    assert "Expected: " in text


def test_plan_for_a_machine_that_is_not_here(tiny: Path, tmp_path: Path) -> None:
    flags = ("plan", str(tiny), "--cache-dir", str(tmp_path), "--json")
    told = json.loads(coli(*flags, "--what-if", "ram=64GiB,disk=7GB/s,cores=16").stdout)
    assert told["budget_bytes"] == told["ram_budget_bytes"] == 64 << 30
    assert told["probes"]["disk_bytes_per_s"] == 7e9
    assert not told["probes"]["is_drive_assumed"]
    assert told["probes"]["threads"] == 16
    refused = coli(*flags, "--what-if", "gpu=1")
    assert (refused.exit_code, "known are ram, disk" in refused.stderr) == (2, True)
    assert coli(*flags, "--what-if", "cores=2", "--no-forecast").exit_code == 2


def test_plan_says_why_there_is_no_forecast(tiny: Path) -> None:
    assert "Expected" not in coli("plan", str(tiny), "--no-forecast").stdout
    text = coli("plan", str(tiny), "--kernels", "reference").stdout
    assert "No speed is forecast: kernels is reference" in " ".join(text.split())


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
        (["hi", "--max-tokens", "1000000"], 2, "(--max-tokens)"),
        (["hi", "--context-length", "1000000"], 2, "--context-length = 1,000,000"),
        (["hi", "--kernels", "reference", "--activations", "int8"], 2, "--activations is int8"),
        ([""], 2, "the prompt is empty"),
        (["hi", "--ram", "900TiB"], 4, "--ram is 900.0 TiB, but this machine has"),
        (["hi", "--expert-slots", "9999"], 2, "--expert-slots = 9999, but this model has"),
        (["hi", "--threads", "99999"], 2, "--threads is 99999, but this process may use"),
        (["hi", "--ram", "8"], 2, "did you mean 8GiB?"),
        (["two", "words"], 2, "put the prompt in quotes"),
        (["--ids", "one"], 2, "--ids: 'one' is no token id"),
    ],
)
def test_refusals_of_run(tiny: Path, arguments: list[str], code: int, message: str) -> None:
    result = coli("run", *arguments, "--model", str(tiny))
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_in_the_place_of_the_prompt(tiny: Path) -> None:
    result = coli("run", str(tiny), "hi", "you")
    assert result.exit_code == 2
    assert f'write `coli run --model {tiny} "hi you"`' in result.stderr


def test_names_are_spelled_as_they_were_given(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_EXPERT_SLOTS", "9999")
    by_variable = coli("plan", str(tiny))
    assert "COLIBRI_EXPERT_SLOTS = 9999" in by_variable.stderr
    by_flag = coli("plan", str(tiny), "--expert-slots", "9998")
    assert "--expert-slots = 9998" in by_flag.stderr


def test_following_the_advice_on_memory_works(tiny: Path) -> None:
    refused = coli("plan", str(tiny), "--ram", "20MB").stderr
    found = re.search(r"raise --ram to at least ([\d.]+) (\w+)", refused)
    assert found is not None, refused
    assert coli("plan", str(tiny), "--ram", "".join(found.groups())).exit_code == 0


def test_an_unknown_family_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    result = coli("info", str(tmp_path))
    assert result.exit_code == 3
    assert f"{tmp_path}: config.json: model_type 'none' is unknown" in result.stderr


def test_a_cache_that_cannot_be_written_is_told_once(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    flags = ("--model", str(tiny), "--max-tokens", "1", "--cache-dir", str(file / "x"))
    assert coli("run", "hi", *flags).exit_code == 0
    assert [m for m in caplog.messages if "measurements are not kept" in m] == [
        f"{file}/x cannot be written: measurements are not kept"
    ]


@pytest.mark.parametrize("command", ["run", "plan", "info", "serve"])
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    result = coli(command, "--model", str(tmp_path / "none"), *(["hi"] if command == "run" else []))
    assert result.exit_code == 3
    assert f"{tmp_path / 'none'}: there is no such directory; name the folder" in result.stderr


def test_defaults_in_the_help_are_as_they_would_be_written() -> None:
    told = " ".join(coli("serve", "--help").stdout.replace("│", " ").split())
    for default in ("16GiB", "64MiB", "false", "true", "2", "10", "8080"):
        assert f"Default: {default}." in told
    assert "Default: False" not in told
