"""`coli pull`, `coli list`, `coli rm`: from a hub to a model that runs, and away again."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.checkpoint.hub.meter import PullProgress
from colibri.cli.main import app
from colibri.cli.pull import how
from colibri.errors import BudgetError, HubError, IncompleteModelError, SettingsError
from tests.hub import COMMIT, Hub

REPO = "owner/tiny"


def coli(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="coli")


@pytest.fixture
def served(hub: Hub, tiny: Path) -> Hub:
    hub.add(REPO, tiny)
    return hub


def test_a_pulled_model_is_known_by_its_name_everywhere(served: Hub, tmp_path: Path) -> None:
    pulled = coli("pull", REPO)
    assert pulled.exit_code == 0, pulled.output
    assert Path(pulled.stdout.strip()).name == COMMIT
    assert "every digest agrees" in pulled.stderr
    (listed,) = json.loads(coli("list", "--json").stdout)
    assert (listed["model"], listed["commit"]) == (REPO, COMMIT)
    assert REPO in coli("list").stdout
    for command in (["info"], ["plan", "--ram", "512MiB"], ["verify"]):
        found = coli(command[0], REPO, *command[1:])
        assert found.exit_code == 0, found.output
    ran = coli("run", "--model", REPO, "--ram", "512MiB", "--max-tokens", "2", "--json", "a")
    assert json.loads(ran.stdout)["completion_tokens"] == 2
    converted = coli("convert", f"{REPO}@{COMMIT}", str(tmp_path / "to"))
    assert converted.exit_code == 0, converted.output


def test_a_model_that_is_not_there_is_to_be_pulled(served: Hub) -> None:
    for command in (["info", REPO], ["run", "--model", REPO, "a"], ["convert", REPO, "to"]):
        found = coli(*command)
        assert found.exit_code == IncompleteModelError.exit_code
        assert f"`coli pull {REPO}`" in found.stderr


def test_a_pull_into_a_directory(served: Hub, tmp_path: Path) -> None:
    found = coli("pull", f"{REPO}@main", "--dir", str(tmp_path / "here"), "--json")
    report = json.loads(found.stdout)
    assert report["directory"] == str(tmp_path / "here")
    assert report["fetched_bytes"] == report["bytes"]
    assert coli("info", str(tmp_path / "here")).exit_code == 0


def test_only_what_is_included_is_fetched(served: Hub, tmp_path: Path) -> None:
    coli("pull", REPO, "--dir", str(tmp_path), "--include", "*.json")
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {".json"}


def test_a_plan_says_before_the_download_what_a_model_needs(
    served: Hub, tiny: Path, tmp_path: Path
) -> None:
    flags = ("--ram", "512MiB", "--expert-slots", "50%", "--json")
    planned = json.loads(coli("pull", REPO, "--plan", *flags).stdout)
    shards = {path.name: path.stat().st_size for path in tiny.glob("*.safetensors")}
    assert all(served.sent[name] <= 64 << 10 for name in shards)
    assert sum(served.sent[name] for name in shards) < sum(shards.values()) / 2
    assert all(asked for path, asked in served.asked if path.endswith(".safetensors"))
    assert not json.loads(coli("list", "--json").stdout)
    here = json.loads(coli("plan", str(tiny), *flags).stdout)
    for name in ("dense_bytes", "slots_bytes", "kv_bytes", "num_slots", "bytes_per_token_cold"):
        assert planned[name] == here[name]
    assert planned["model"] == REPO
    assert f"`coli pull {REPO}`" in coli("pull", REPO, "--plan", *flags[:-1]).stdout


def test_a_plan_says_that_it_will_not_run(served: Hub) -> None:
    found = coli("pull", REPO, "--plan", "--ram", "1MiB")
    assert found.exit_code == BudgetError.exit_code
    assert "--ram" in found.stderr


def test_settings_of_a_plan_are_refused_without_one(served: Hub) -> None:
    found = coli("pull", REPO, "--ram", "8GiB")
    assert (found.exit_code, "--plan" in found.stderr) == (SettingsError.exit_code, True)
    assert not served.asked


@pytest.mark.parametrize("name", ["tiny", "owner/other"])
def test_what_the_hub_has_not_is_said(served: Hub, name: str) -> None:
    assert coli("pull", name).exit_code == HubError.exit_code


def test_rm_asks_and_takes_away(served: Hub) -> None:
    coli("pull", REPO)
    refused = coli("rm", REPO)
    assert (refused.exit_code, "--yes" in refused.stderr) == (SettingsError.exit_code, True)
    assert json.loads(coli("list", "--json").stdout)
    removed = json.loads(coli("rm", REPO, "--yes", "--json").stdout)
    assert removed["freed_bytes"] > 0
    assert coli("list").stdout == ""
    assert coli("rm", REPO, "--yes").exit_code == HubError.exit_code


@pytest.mark.parametrize(
    ("progress", "told"),
    [
        (
            PullProgress(1 << 20, 3 << 20, 1 << 20, 0.1),
            "1.0 MiB of 3.0 MiB, 1.0 MiB/s, 2.00 s left",
        ),
        (PullProgress(0, 1 << 20, 0, 0.1), "0 B of 1.0 MiB, 0 B/s"),
        (PullProgress(0, 1 << 20, 5, 7.2), "0 B of 1.0 MiB, nothing came for 7 s"),
    ],
)
def test_progress_has_a_rate_and_the_time_left(progress: PullProgress, told: str) -> None:
    assert how(progress) == told


@pytest.mark.parametrize("how", ["gone", "short", "wrong"])
@pytest.mark.parametrize("in_cache", [True, False])
def test_what_verify_advises_fetches_one_file_again(
    in_cache: bool, how: str, served: Hub, tmp_path: Path
) -> None:
    where = () if in_cache else ("--dir", str(tmp_path / "here"))
    directory = Path(coli("pull", REPO, *where).stdout.strip())
    assert coli("verify", str(directory), "--deep").exit_code == 0
    shard = sorted(directory.glob("experts-*"))[0]
    data, path = shard.read_bytes(), shard.resolve()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-7] if how == "short" else bytes([data[0]]) + data[1:-1] + b"x")
    served.sent.clear()
    checked = coli("verify", str(directory), *(["--deep"] if how == "wrong" else []))
    assert (checked.exit_code, str(shard) in checked.stderr) == (3, True)
    command = shlex.split(checked.stderr.split("`coli ")[1].split("`")[0])
    assert command[:2] == ["pull", f"{REPO}@{COMMIT}"]
    assert coli(*command).exit_code == 0
    assert set(served.sent) == {shard.name}
    assert shard.read_bytes() == data
    assert coli("verify", str(directory), "--deep").exit_code == 0
