"""The environment is read in one place only."""

import ast
import re

import pytest

from tests.architecture.sources import PACKAGE, native_files, place, python_files, tree

READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
SETTINGS = (PACKAGE / "settings.py", PACKAGE / "settings")


def environment_uses(module: ast.Module) -> list[int]:
    """Lines that touch the environment through `os`."""
    return [
        node.lineno
        for node in ast.walk(module)
        if (isinstance(node, ast.Attribute) and node.attr in READERS and is_os(node.value))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and imports_reader(node))
    ]


def is_os(node: ast.expr) -> bool:
    """True for the bare name `os`."""
    return isinstance(node, ast.Name) and node.id == "os"


def imports_reader(node: ast.ImportFrom) -> bool:
    """True for `from os import environ` and its like."""
    return any(alias.name in READERS or alias.name == "*" for alias in node.names)


def test_only_settings_reads_the_environment() -> None:
    found = [
        place(path, line)
        for path in python_files(PACKAGE)
        if not any(path == home or home in path.parents for home in SETTINGS)
        for line in environment_uses(tree(path))
    ]
    assert found == []


def test_native_code_reads_no_environment() -> None:
    files = native_files()
    assert files
    found = [
        place(path, number)
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b(secure_)?getenv\b|\benviron\b", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']\n", [2]),
        ("import os\n\nos.getenv('A')\n", [3]),
        ("from os import environ\n", [1]),
        ("import os\nos.cpu_count()\n", []),
    ],
)
def test_environment_uses_are_seen(source: str, lines: list[int]) -> None:
    assert environment_uses(ast.parse(source)) == lines
