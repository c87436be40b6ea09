"""What the command line imports before it has said anything."""

import json
import subprocess
import sys

import pytest
import typer

from colibri.cli.commands import SUMMARIES, load

HEAVY = ("numpy", "colibri.llm.facade")
LIGHT = ("run", "chat", "info", "plan", "verify")


def imported(code: str) -> set[str]:
    """Modules that a program has imported in the end."""
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_come_at_once(argument: str) -> None:
    code = f"sys.argv = ['coli', {argument!r}]\nfrom colibri.__main__ import main\nmain()"
    modules = imported(code)
    assert modules.isdisjoint(HEAVY)
    assert ("typer" in modules) is (argument == "--help")


@pytest.mark.parametrize("command", LIGHT)
def test_flags_are_declared_without_the_engine(command: str) -> None:
    modules = imported(f"from colibri.cli.commands import load\nload({command!r})")
    assert f"colibri.cli.{command}" in modules
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_says_what_the_command_says_itself(name: str) -> None:
    command = load(name)
    assert isinstance(command, typer.core.TyperCommand | typer.core.TyperGroup)
    assert command.help is not None
    assert " ".join(command.help.split("\n\n")[0].split()) == SUMMARIES[name]
