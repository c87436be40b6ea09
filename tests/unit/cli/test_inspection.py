"""SIGUSR1: what a running command says of itself."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
Spawn = Callable[..., "subprocess.CompletedProcess[str]"]


def line_with(process: "subprocess.Popen[str]", wanted: str) -> str:
    """The next line of stderr that holds `wanted`; a process that ends before fails the test."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        if wanted in line:
            return line
        told.append(line)
    raise AssertionError(f"it ended without {wanted!r}: {''.join(told)}")


def answer_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    os.kill(process.pid, signal.SIGUSR1)
    found: dict[str, Any] = json.loads(line_with(process, "{"))
    return found


def check(state: dict[str, Any], slots: int) -> None:
    for each in state["slots"]:
        states = [each[name] for name in ("empty", "loading", "ready", "failed")]
        assert sum(states) == each["usable"]
        assert 0 <= each["leased"] <= each["usable"]
    assert sum(each["usable"] for each in state["slots"]) == slots
    store = state["store"]
    assert store["hits"] + store["misses"] == store["requests"]
    assert min(state["queues"].values()) >= 0
    for ledger in (state["ahead"]["predicted"], state["ahead"]["warmed"]):
        assert sum(ledger.values()) - 2 * ledger["read"] <= 0


def test_chat_answers_between_and_after_turns(tiny: Path) -> None:
    command = ["chat", "--model", str(tiny), "--expert-slots", "8", "--max-tokens", "4"]
    with subprocess.Popen(
        [sys.executable, "-m", "colibri", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("/help\n")  # once it answers, it listens
        process.stdin.flush()
        line_with(process, "Alt-Enter")
        state = answer_of(process)
        check(state, 8)
        assert state["sessions"] == [{"position": 0}]
        process.stdin.write("hello\n")
        process.stdin.flush()
        line_with(process, "tok/s")
        state = answer_of(process)
        check(state, 8)
        assert state["sessions"][0]["position"] > 0
        assert state["metrics"]["completion_tokens"] == 4
        process.stdin.close()
        assert process.wait(60) == 0


def test_run_answers_while_it_computes(tiny: Path) -> None:
    command = ["run", "hi", "--model", str(tiny), "--expert-slots", "8", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "colibri", *command, "--max-tokens", "200"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)  # it has begun
        os.kill(process.pid, signal.SIGUSR1)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0
    lines = [json.loads(line) for line in told.splitlines() if line.startswith(b"{")]
    assert len(lines) == 1
    check(lines[0], 8)
    assert [each["position"] > 0 for each in lines[0]["sessions"]] == [True]


def test_a_profile_of_the_command(tiny: Path, spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = spawn("run", "hi", "--model", str(tiny), "--profile", str(path), "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert any(event.get("name") == "forward" for event in json.loads(path.read_text()))
