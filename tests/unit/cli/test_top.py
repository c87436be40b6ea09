"""`coli top`: a line a look where nobody watches, a table on a terminal."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.cli.top import bar, line, table
from colibri.errors import RequestError
from colibri.lab.watch import Sight, Watched
from tests.unit.lab.test_watch import told

SIGHT = Sight.between(told(), told(2, completion_tokens=35, experts={"requests": 200}), 1.0)


def coli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], prog_name="coli")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    left = [told(), told(2, completion_tokens=30), told(3, completion_tokens=30)]
    monkeypatch.setattr(Watched, "look", lambda self: left.pop(0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return left


def test_a_line_a_look(looks: list[dict[str, Any]]) -> None:
    result = coli("--count", "2")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert " tokens/s" in first
    assert second.startswith("– tokens/s")
    assert "2 running, 1 waiting, 750 B of 1000 B" in first


def test_objects(looks: list[dict[str, Any]]) -> None:
    found = [json.loads(text) for text in coli("--count", "2", "--json").stdout.splitlines()]
    assert [each["num_running"] for each in found] == [2, 2]
    assert found[0]["decode_tokens_per_s"] > 0
    assert found[1]["decode_tokens_per_s"] is None


def test_leaving_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Watched) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watched, "look", interrupt)
    assert coli().exit_code == 0


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Watched) -> None:
        raise RequestError(f"{self.host}: nobody answers")

    monkeypatch.setattr(Watched, "look", refuse)
    result = coli("--port", "9")
    assert result.exit_code == 2
    assert "127.0.0.1:9: nobody answers" in result.stderr


def test_a_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(table(SIGHT, "here:1"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("m at here:1: ready", "25.0 tokens/s", "lossy", "kv=int8", "1 waiting"):
        assert part in text
    assert "lossy" not in line(replace(SIGHT, lossy=()))


def test_bars() -> None:
    assert (bar(0), bar(1)) == ("░" * 24, "█" * 24)
    assert bar(0.5) == "█" * 12 + "░" * 12
    assert bar(None) == bar(0)
    assert bar(7) == bar(1)
