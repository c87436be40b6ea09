"""README's examples run as they are printed.

A fenced block marked `console runnable` holds shell commands, one on each line that starts with
`$ `; one marked `python runnable` is a script. They run in order, in one folder in which
`my-model` is a small checkpoint, and must exit with 0.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

BLOCK = re.compile(r"^```(console|python) runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The argument lists of every runnable block, in order."""
    found: list[list[str]] = []
    for language, body in BLOCK.findall(text):
        if language == "python":
            found.append([sys.executable, "-c", body])
        else:
            found += [["sh", "-c", ln[2:]] for ln in body.splitlines() if ln.startswith("$ ")]
    return found


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `my-model` and, under `bin`, the command `coli` of this checkout."""
    folder = tmp_path_factory.mktemp("readme")
    coli = folder / "bin" / "coli"
    coli.parent.mkdir()
    coli.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'coli'\n"
        "from colibri.cli.main import main\nraise SystemExit(main())\n"
    )
    coli.chmod(coli.stat().st_mode | stat.S_IXUSR)
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    subprocess.run([sys.executable, tool, "my-model", "--shape", "tiny"], cwd=folder, check=True)
    return folder


README = commands((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", README, ids=[c[-1].strip()[:60] for c in README])
def test_readme_example(command: list[str], workplace: Path) -> None:
    path = f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        cwd=workplace,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_has_runnable_examples() -> None:
    assert {command[0] for command in README} == {"sh", sys.executable}


def test_commands_are_found() -> None:
    text = "```console runnable\n$ a b\nprinted\n$ c\n```\n```console\n$ not run\n```\n"
    assert commands(text) == [["sh", "-c", "a b"], ["sh", "-c", "c"]]
