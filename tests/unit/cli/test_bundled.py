"""What commands do when no model is named; the model stands in for the bundled one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri import LLM
from colibri.cli.main import app
from colibri.cli.options import NOTICE
from colibri.models.convert import convert_model
from tests.tiny import PLAIN, write_tiny
from tests.unit.cli.conftest import Coli
from tests.unit.llm.fakes import write_tokenizer


def coli(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="coli", input=stdin)


@pytest.fixture
def bundled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container in the place of the bundled one."""
    folder = tmp_path_factory.mktemp("package")
    write_tiny(folder / "from", PLAIN)
    convert_model(folder / "from", folder / "bundled", dense="int8-g64")
    # What else lies beside the weights there.
    for name in ("experts.json", "card.json"):
        (folder / "bundled" / name).write_text("{}")
    monkeypatch.setattr("colibri.llm.location.BUNDLED", folder / "bundled")
    return folder / "bundled"


COMMANDS: dict[str, list[str]] = {
    "run": ["run", "--ids", "1 2", "--max-tokens", "2", "--json"],
    "info": ["info", "--json"],
    "plan": ["plan", "--json"],
    "verify": ["verify", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_used_and_announced_once(command: str, bundled: Path) -> None:
    result = coli(*COMMANDS[command])
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    model = facts["settings"]["model"] if command == "run" else facts["model"]
    assert model == str(bundled)
    assert result.stderr.splitlines()[0] == NOTICE
    assert result.stderr.count(NOTICE) == 1
    assert "no assistant" in NOTICE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_model_goes_first(
    command: str, bundled: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = coli(*COMMANDS[command], "--model", str(tiny))
    monkeypatch.setenv("COLIBRI_MODEL", str(tiny))
    for result in (named, coli(*COMMANDS[command])):
        assert str(tiny) in result.stdout
        assert NOTICE not in result.stderr


def test_the_facade_uses_it_too(bundled: Path) -> None:
    with LLM.open() as llm:
        assert llm.prepared.directory == bundled


@pytest.mark.parametrize("command", COMMANDS)
def test_without_one_the_next_step_is_told(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colibri.llm.location.BUNDLED", tmp_path)
    result = coli(*COMMANDS[command])
    assert result.exit_code == 2
    assert NOTICE not in result.stderr
    assert "no model is named, and none came with this installation" in result.stderr


@pytest.mark.parametrize(("given", "tokens"), [([], 100), (["--max-tokens", "7"], 7)])
def test_chat_continues_and_says_how_far(coli: Coli, given: list[str], tokens: int) -> None:
    write_tokenizer(coli.directory, chat=False)
    result = coli("chat", "--ignore-eos", *given, stdin="a\n")
    assert f"no assistant and continues what you write, {tokens} tokens at a time" in result.stderr
    assert f"{tokens} tokens (length)" in result.stderr
