"""`coli convert` and `coli verify` as their users start them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.checkpoint.container_manifest import MANIFEST, PROGRESS
from colibri.cli.main import app
from colibri.models.family import Family
from tests.tiny import PLAIN, each_family, write_tiny

Spawn = Callable[..., "subprocess.CompletedProcess[str]"]


def coli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="coli")


# Converts, and is killed or interrupted by itself after so many experts.
STOPPED = """
import os, signal, sys
from colibri.checkpoint import convert
from colibri.cli.main import main
after, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
advance, count = convert._Job._advance, 0
def counted(self, what, nbytes):
    global count
    count += 1
    if count == after:
        os.kill(os.getpid(), number)
    advance(self, what, nbytes)
convert._Job._advance = counted
raise SystemExit(main())
"""


def stopped(after: int, number: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", STOPPED, str(after), str(int(number)), "convert", *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=False,
    )


@each_family
def test_a_family_converts_runs_and_verifies(family: Family, tmp_path: Path) -> None:
    source, made = write_tiny(tmp_path / "from", family), tmp_path / "to"
    result = coli("convert", source, made, "--dense", "int8-g64", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ratio"] == report["source_bytes"] / report["total_bytes"] > 1
    sizes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert report["source_bytes"] == sizes
    assert report["total_bytes"] == sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert coli("verify", "--deep", made).exit_code == 0
    run = coli("run", "--ids", "1 2 3", "--model", made, "--max-tokens", "4", "--ignore-eos")
    assert run.exit_code == 0, run.stderr
    assert len(run.stdout.split()) == 4


def test_it_says_what_it_does(tiny_source: Path, tmp_path: Path, spawn: Spawn) -> None:
    result = spawn("convert", str(tiny_source), str(tmp_path / "to"))
    assert (result.returncode, result.stdout) == (0, "")
    first, *plan, writing, last = result.stderr.splitlines()
    assert first == f"opening {tiny_source} …"
    assert writing == f"writing {tmp_path / 'to'} …"
    assert [line.split("  ")[0] for line in plan] == ["experts", "dense", "head", "in all"]
    assert "f32 to int4-g64" in plan[0]
    assert "smaller, about" in plan[-1]
    assert last.startswith(f"{tmp_path / 'to'}: ")
    assert "smaller" in last


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("convert") / "from", PLAIN)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_stopped_conversion_goes_on(
    number: signal.Signals, code: int, tiny_source: Path, tmp_path: Path
) -> None:
    made, whole = tmp_path / "to", tmp_path / "whole"
    experts = PLAIN.tiny_config()
    count = experts.get("num_experts") or experts["num_local_experts"]
    result = stopped(count + 2, number, str(tiny_source), str(made))
    assert result.returncode == code
    assert (made / PROGRESS).exists()
    assert not (made / MANIFEST).exists()
    if number is signal.SIGINT:
        assert f"is kept in {made}: run the same command again" in result.stderr
        assert "Traceback" not in result.stderr
    opened = coli("run", "--ids", "1", "--model", made)
    assert opened.exit_code == 3
    assert "run its `coli convert …` again" in opened.stderr

    again = coli("convert", tiny_source, made, "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["num_kept_layers"] == 1
    assert coli("convert", tiny_source, whole).exit_code == 0
    contents = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {path.name: path.read_bytes() for path in made.iterdir()} == contents


def test_a_directory_in_use_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = coli("convert", tiny_source, tmp_path)
    assert result.exit_code == 3
    assert "holds other files; name an empty directory" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_source_is_no_destination(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_source)
    for destination, message in (
        (tiny_source, "source and destination are the same directory"),
        (Path(), "source and destination are the same directory"),
        (tiny_source / "to", f"is inside the source {tiny_source}"),
        (tiny_source.parent, f"holds the source {tiny_source}"),
    ):
        result = coli("convert", tiny_source, destination)
        assert result.exit_code == 3
        assert f"{destination}: {message}" in result.stderr
        assert "remove" not in result.stderr
    assert not (tiny_source / "to").exists()


def test_a_destination_that_cannot_be_written(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "os.access", lambda path, mode: not mode & os.W_OK or Path(path) != tmp_path
    )
    for destination in (tmp_path, tmp_path / "below" / "to"):
        result = coli("convert", tiny_source, destination)
        assert (result.exit_code, list(tmp_path.iterdir())) == (3, [])
        assert f"{tmp_path}: cannot be written to" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "to"], "nowhere: there is no such directory"),
        (["{source}", "to", "--experts", "int4-g6"], "did you mean 'int4-g64'"),
        (["{source}", "to", "--dense", "q"], "'q'"),
        (["{source}", "to", "--experts", ""], "unknown weight format ''"),
    ],
)
def test_refusals(
    arguments: list[str],
    message: str,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = coli("convert", *(argument.format(source=tiny_source) for argument in arguments))
    assert (result.exit_code, result.stdout) == (3, "")
    assert message in result.stderr
    assert not (tmp_path / "to").exists()


def test_codes_are_not_rounded_twice_and_may_be_kept(tiny_source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert coli("convert", tiny_source, first, "--experts", "int8-g64").exit_code == 0
    result = coli("convert", first, second)
    assert result.exit_code == 3
    assert "rounded a second time" in result.stderr
    assert coli("convert", first, second, "--experts", "keep").exit_code == 0
    for path in first.glob("experts-*"):
        assert (second / path.name).read_bytes() == path.read_bytes()


def test_an_unknown_variable_is_refused(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_MODLE", "x")
    result = coli("convert", tiny_source, tmp_path / "to")
    assert result.exit_code == 2
    assert "did you mean COLIBRI_MODEL" in result.stderr


def test_verify_names_what_is_damaged(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    assert coli("convert", tiny_source, made).exit_code == 0
    facts = json.loads(coli("verify", "--deep", made, "--json").stdout)
    assert facts["ok"]
    assert facts["files"] == len(list(made.glob("*.safetensors")))
    path = sorted(made.glob("experts-*"))[-1]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    result = coli("verify", "--deep", made)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"{path}: layer" in result.stderr


def test_verify_reads_the_tokenizer(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    assert coli("convert", tiny_source, made).exit_code == 0
    tokenizer = made / "tokenizer.json"
    tokenizer.write_text("{", encoding="utf-8")
    result = coli("verify", "--deep", made)
    assert (result.exit_code, result.stdout) == (3, "")
    assert str(tokenizer) in result.stderr


def test_verify_says_what_it_cannot_check(tiny_source: Path) -> None:
    result = coli("verify", tiny_source)
    assert result.exit_code == 0
    assert "contents were not checked" in result.stderr


def test_codes_widen_to_f32(tiny_source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert coli("convert", tiny_source, first, "--experts", "int4-g64").exit_code == 0
    widened = coli("convert", first, second, "--experts", "f32")
    assert widened.exit_code == 0, widened.stderr
    assert " larger)" in widened.output
    assert "the container will be larger than its source by" in widened.stderr
    assert coli("verify", "--deep", second).exit_code == 0
    assert "f32" in json.loads(coli("info", second, "--json").stdout)["formats"]


def test_a_destination_that_is_a_file(tiny_source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for destination in (file, file / "below"):
        result = coli("convert", tiny_source, destination)
        assert result.exit_code == 3
        assert f"{file}: is a file: name a directory" in result.stderr


def test_a_destination_that_is_a_link_to_nothing(tiny_source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    result = coli("convert", tiny_source, link)
    assert result.exit_code == 3
    assert f"{link}: is a link to nothing: name a directory" in result.stderr


def test_resuming_with_another_format_is_told_in_words(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    assert stopped(1, signal.SIGINT, str(tiny_source), str(made)).returncode == 130
    result = coli("convert", tiny_source, made, "--experts", "int8-g64")
    assert result.exit_code == 3
    assert "holds an unfinished conversion of" in result.stderr
    assert "{" not in result.stderr
    for name in ("int4-g64", "int8-g64"):
        assert f"experts '{name}'" in result.stderr


def test_what_is_kept_is_not_said_of_nothing(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    result = stopped(1, signal.SIGINT, str(tiny_source), str(made))
    assert "stopped; nothing was finished" in result.stderr


def test_verify_lists_everything_that_is_damaged(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    assert coli("convert", tiny_source, made).exit_code == 0
    damaged = sorted(made.glob("experts-*"))
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-5000] ^= 4
        path.write_bytes(data)
    result = coli("verify", "--deep", made)
    assert result.exit_code == 3
    assert f"{len(damaged)} damages" in result.stderr
    assert all(f"{path}: layer" in result.stderr for path in damaged)


def test_heads_that_are_not_there_are_refused_in_words(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    assert coli("convert", tiny_source, made).exit_code == 0
    for model, why in (
        (tiny_source, "tensors `mtp.*`"),
        (made, "the checkpoint it was made from may have some"),
    ):
        result = coli("run", "--ids", "1", "--model", model, "--mtp", "true")
        assert result.exit_code == 3
        assert why in result.stderr
        assert result.stderr.rstrip().endswith("leave --mtp out")


def test_a_plan_writes_nothing(tiny_source: Path, tmp_path: Path) -> None:
    made = tmp_path / "to"
    flags = ("--plan", "--head", "int8-g64", "--dense", "int4-g64")
    shown = coli("convert", tiny_source, made, *flags)
    assert shown.exit_code == 0, shown.stderr
    assert not made.exists()
    found = json.loads(coli("convert", tiny_source, made, *flags, "--json").stdout)
    formats = {part["name"]: part["formats"] for part in found["parts"]}
    assert formats["head"] == ["int8-g64"]
    assert formats["dense"][0] == "int4-g64"
    assert found["estimate_s"] > 0
    report = json.loads(coli("convert", tiny_source, made, *flags[1:], "--json").stdout)
    assert report["source_bytes"] == found["source_bytes"]
    assert 0 < report["total_bytes"] - found["total_bytes"] < 1 << 20  # headers


def test_what_verify_advises_repairs(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_source.parent)  # the container knows its source by name
    made = tmp_path / "to"
    assert coli("convert", tiny_source, made).exit_code == 0
    path = sorted(made.glob("experts-*"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-5000] + bytes([data[-5000] ^ 4]) + data[-4999:])
    assert coli("verify", made).exit_code == 0  # headers and sizes agree
    told = coli("verify", made, "--deep").stderr
    command = told.split("`coli ")[1].split("`")[0].split()
    assert command == ["convert", tiny_source.name, str(made), "--repair"]
    repaired = coli(*command)
    assert repaired.exit_code == 0, repaired.stderr
    assert "made anew: expert" in repaired.stderr
    assert path.read_bytes() == data
    assert coli("verify", made, "--deep").exit_code == 0
    assert "nothing is damaged" in coli(*command).stderr


def test_repair_with_another_source_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    made, other = tmp_path / "to", write_tiny(tmp_path / "other", PLAIN, num_hidden_layers=1)
    assert coli("convert", tiny_source, made).exit_code == 0
    result = coli("convert", other, made, "--repair")
    assert (result.exit_code, "has other tensors" in result.stderr) == (3, True)
