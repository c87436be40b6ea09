"""Files and functions stay small enough to be read in one go."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.architecture.sources import (
    PACKAGE,
    ROOT,
    native_files,
    num_lines,
    place,
    python_files,
    tree,
)

CAP, CAP_WITH_REASON = 400, 500
# In a file's first twenty lines, for example: "Over 400 lines because the table is one piece."
REASON = re.compile(r"over 400 lines because \w+", re.IGNORECASE)


def cap(path: Path) -> int:
    """The lines that the file may have."""
    top = "\n".join(path.read_text(encoding="utf-8").splitlines()[:20])
    return CAP_WITH_REASON if REASON.search(top) else CAP


def function_lines(module: ast.Module) -> Iterator[tuple[int, int]]:
    """First line and length of every function; its docstring does not count."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the function's docstring, 0 without one."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def test_no_file_is_longer_than_the_cap() -> None:
    files = native_files() + python_files(*(ROOT / f for f in ("src", "tests", "tools", "native")))
    assert files
    assert [place(path, num_lines(path)) for path in files if num_lines(path) > cap(path)] == []


def test_the_usual_file_is_short() -> None:
    lengths = [num_lines(p) for p in python_files(PACKAGE) if p.name != "__init__.py"]
    assert median(lengths) <= 150


def test_functions_are_short() -> None:
    found = [
        (lines, place(path, line))
        for path in python_files(PACKAGE)
        for line, lines in function_lines(tree(path))
    ]
    found.sort()
    longest = found[-(len(found) // 20 + 1) :]
    assert median(lines for lines, _ in found) <= 8
    assert longest[0][0] <= 40, longest


def defines_a_family(path: Path) -> bool:
    """True where the module assigns `FAMILY`."""
    targets = [
        target
        for node in tree(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return any(isinstance(target, ast.Name) and target.id == "FAMILY" for target in targets)


def test_a_family_is_one_short_file() -> None:
    families = [path for path in python_files(PACKAGE / "models") if defines_a_family(path)]
    assert families
    assert [place(path, num_lines(path)) for path in families if num_lines(path) > 90] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    return 1\n", 2),
        ('def f():\n    """Says.\n\n    More.\n    """\n    return 1\n', 2),
        ("async def f(\n    a,\n):\n    return a\n", 4),
    ],
)
def test_function_lines(source: str, lines: int) -> None:
    assert list(function_lines(ast.parse(source))) == [(1, lines)]
