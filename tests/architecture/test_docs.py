"""The examples of README and of the pages in docs run as they are printed.

A fenced block marked `console runnable` holds shell commands, one on each line that starts with
`$ `; one marked `python runnable` is a script. They run in order, in one folder beside `tools`,
and must exit with 0. What no test can run is named in `ELSEWHERE`.
Each page begins anew, in a folder of its own.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

# Run by their own tests: the tests by one of them, the server by tests/unit/cli/test_serve.py.
ELSEWHERE = {"make demo", "make test", "coli serve --model my-model"}
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


@pytest.fixture
def beside_tools(tmp_path: Path) -> Path:
    """A folder with `tools` and, under `bin`, the commands `coli` and `python` of this checkout."""
    folder = tmp_path
    coli = folder / "bin" / "coli"
    coli.parent.mkdir()
    coli.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'coli'\n"
        "from colibri.cli.main import main\nraise SystemExit(main())\n"
    )
    coli.chmod(coli.stat().st_mode | stat.S_IXUSR)
    python = coli.parent / "python"  # a link would lose the virtual environment
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(coli.stat().st_mode)
    (folder / "tools").symlink_to(ROOT / "tools")
    return folder


PAGES = {
    path.name: found
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (found := commands(path.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_in_order(page: str, beside_tools: Path) -> None:
    path = f"{beside_tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for command in PAGES[page]:
        result = subprocess.run(
            command,
            cwd=beside_tools,
            env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(beside_tools / "cache")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, f"{command[-1]}\n{result.stdout}{result.stderr}"


def test_every_other_command_is_run_elsewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = {line[2:].split("  ")[0] for block in plain for line in block.splitlines()}
    assert found == ELSEWHERE


def test_readme_has_runnable_examples() -> None:
    assert {command[0] for command in PAGES["README.md"]} == {"sh", sys.executable}


def test_commands_are_found() -> None:
    text = "```console runnable\n$ a b\nprinted\n$ c\n```\n```console\n$ not run\n```\n"
    assert commands(text) == [["sh", "-c", "a b"], ["sh", "-c", "c"]]
