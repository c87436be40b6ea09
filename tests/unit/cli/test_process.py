"""The command as its users start it, over a real checkpoint."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    assert few["bytes_read"] > all_of_them["bytes_read"] > 0
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
