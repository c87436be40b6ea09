"""What a model must live through: kill -9, a directory it cannot write, memory taken away."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from colibri import LLM
from colibri.memory import pressure
from colibri.memory.usage import NAME

PROMPT = [17, 200, 3, 88, 45, 9]

TURNS = """
import sys
from colibri import LLM
with LLM.open(sys.argv[1], expert_slots=8, heat=True) as llm:
    for turn in range(10_000):
        llm.generate([turn % 200 + 1, 5, 7], max_tokens=2, ignore_eos=True)
        print(llm._heat._usage.counts.sum(), flush=True)
"""

READ_ONLY = """
import ctypes, os, sys
from pathlib import Path
from colibri import LLM
none = (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), none)  # not even root may write now
try:
    Path(sys.argv[1], "file").write_text("")
    raise SystemExit("it can be written")
except PermissionError:
    pass
for _ in range(2):
    with LLM.open(sys.argv[1], expert_slots=8, heat=True, prefetch="on") as llm:
        tokens = llm.generate([17, 200, 3], max_tokens=4, ignore_eos=True).token_ids
        llm.generate([1, 2, 3], max_tokens=1)
    print(list(tokens))
    print(len(llm.notes), "cannot be written" in llm.notes[0])
"""


def heat_of(model: Path) -> float:
    """What the file of a model holds; a damaged one is a failure."""
    with LLM.open(model, expert_slots=8, heat=True, warm_start=False) as llm:
        assert llm._heat is not None
        assert llm.notes == ()
        return float(llm._heat._usage.counts.sum())


def test_kill_9_loses_no_heat_but_the_last_turns(tiny: Path) -> None:
    """Killed at any time, also while it writes: what a turn before has saved is there."""
    known = 0.0
    for delay in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", TURNS, tiny], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(2 + delay):
                known = float(process.stdout.readline())
            for _ in range(delay * 6000):  # somewhere in the turn that follows
                pass
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().splitlines()
        known = float(told[-1]) if told and told[-1].endswith(tuple("0123456789")) else known
        assert heat_of(tiny) > 0.99 * known > 0
    (tiny / NAME).unlink()


def test_a_directory_that_cannot_be_written(tiny: Path) -> None:
    mode = tiny.stat().st_mode
    tiny.chmod(0o555)
    try:
        result = subprocess.run(
            [sys.executable, "-c", READ_ONLY, tiny],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        tiny.chmod(mode)
    assert result.returncode == 0, result.stdout + result.stderr
    first, noted, second, again = result.stdout.splitlines()
    assert (first, noted) == (second, again)
    assert noted == "1 True"
    assert not list(tiny.glob(".coli*"))


def test_memory_that_is_taken_away_changes_no_token(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tokens there is less and less; slots go, and the reply stays."""
    now = [0.0]
    with LLM.open(tiny, expert_slots="100%") as llm:
        expected = reply(llm)
        usable = llm.metrics().experts
        assert usable.requests > 0
    left = [replace(pressure.sample_memory(), available=1 << 40)]
    monkeypatch.setattr(
        pressure.Pressure.__init__, "__defaults__", (lambda: left[0], lambda: now[0])
    )
    with LLM.open(tiny, expert_slots="100%") as llm:
        before = slots(llm)
        found = []
        with llm.stream(PROMPT, max_tokens=8, ignore_eos=True) as stream:
            for chunk in stream:
                found += chunk.token_ids
                now[0] += 2
                left[0] = replace(left[0], available=0)
        assert found == expected
        assert slots(llm) < before
        counts = llm.metrics().experts
        assert counts.hits + counts.misses == counts.requests
        assert reply(llm) == expected


def reply(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids)


def slots(llm: LLM) -> int:
    return sum(each["usable"] for each in llm.inspect()["slots"])
