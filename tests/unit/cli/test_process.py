"""The command as its users start it, over a real checkpoint."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Spawn = Callable[..., "subprocess.CompletedProcess[str]"]


def test_run_tells_the_same_tokens_for_every_number_of_slots(tiny: Path, spawn: Spawn) -> None:
    replies: list[dict[str, Any]] = []
    for slots in ("8", "100%"):
        result = spawn(
            *("run", "The bird", "--json", "--model", str(tiny), "--expert-slots", slots),
            *("--max-tokens", "12", "--ignore-eos"),
        )
        assert result.returncode == 0, result.stderr
        replies.append(json.loads(result.stdout))
    few, all_of_them = replies
    assert few["token_ids"] == all_of_them["token_ids"]
    assert (
        few["bytes_read"] > all_of_them["bytes_read"]
    )  # those are there before they are asked for
    for reply in replies:
        assert reply["completion_tokens"] == len(reply["token_ids"]) == 12
        assert 0 < reply["peak_rss_bytes"] <= reply["ram_budget_bytes"]


def test_a_reader_that_leaves_is_no_failure(tiny: Path) -> None:
    command = [sys.executable, "-m", "colibri.cli.main", "run", "hi", "--model", str(tiny)]
    with subprocess.Popen(
        [*command, "--ignore-eos", "--max-tokens", "200"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        messages = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert "error" not in messages
    assert "Traceback" not in messages


COLI = (sys.executable, "-m", "colibri")


@pytest.mark.parametrize(
    ("planning", "doing"), [(["plan"], ["run", "hi"]), (["plan", "--serve"], ["serve"])]
)
def test_a_plan_counts_the_process_that_will_run(
    tiny: Path, spawn: Spawn, planning: list[str], doing: list[str]
) -> None:
    sizes = []
    for command in (planning, doing):
        result = spawn(*command, "--model", str(tiny), "--ram", "64MiB")
        assert result.returncode == 4, result.stderr
        found = re.search(r"process ([\d.]+) MiB", result.stderr)
        assert found is not None, result.stderr
        sizes.append(float(found[1]))
    assert abs(sizes[0] - sizes[1]) <= 1.0  # what starts of one program differ by


def test_sessions_are_for_the_server(tiny: Path, spawn: Spawn) -> None:
    planned = spawn("plan", str(tiny), "--max-sessions", "2")
    assert planned.returncode == 2
    assert "--max-sessions is for `coli serve`" in planned.stderr
    assert "No such option" in spawn("run", "hi", "--max-sessions", "2").stderr
    plans = [
        json.loads(spawn("plan", str(tiny), "--json", *flags).stdout)
        for flags in ([], ["--serve"], ["--serve", "--max-sessions", "2"])
    ]
    assert [plan["max_sessions"] for plan in plans] == [1, 4, 2]


def test_prompts_are_utf8_whatever_the_locale(tiny: Path) -> None:
    command = [*COLI, "run", "--json", "--max-tokens", "1", "--model", str(tiny)]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(argument: list[bytes], stdin: bytes) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [*command, *argument], input=stdin, env=plain, capture_output=True, check=False
        )

    text = "h\u00e9 \u4e2d".encode()
    for argument, stdin in (([text], b""), ([], text)):
        result = run(argument, stdin)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["prompt_tokens"] == len(text)
    for argument, stdin in (([b"\xff"], b""), ([], b"\xff")):
        result = run(argument, stdin)
        assert result.returncode == 2
        assert b"is no text" in result.stderr


def test_an_output_that_cannot_be_written(tiny: Path) -> None:
    command = [*COLI, "run", "hi", "--max-tokens", "2", "--model", str(tiny)]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 74
    assert b"No space left" in result.stderr
    assert b"bug" not in result.stderr
    assert b"Exception" not in result.stderr
    closed = [sys.executable, "-c", f"import os; os.close(1); os.execv({COLI[0]!r}, {command!r})"]
    result = subprocess.run(closed, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 0, result.stderr


def test_ctrl_c_while_it_is_imported() -> None:
    program = (
        "import sys, runpy\n"
        "class Press:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': exec('raise KeyboardInterrupt')\n"  # as where it makes classes
        "sys.meta_path.insert(0, Press())\n"
        "runpy.run_module('colibri', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (130, "coli: interrupted\n")
