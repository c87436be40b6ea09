"""The source files as the architecture tests see them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "colibri"
GENERATED = {PACKAGE / "_build.py"}


def python_files(*folders: Path) -> list[Path]:
    """Every hand-written Python file below the folders, in a fixed order."""
    return sorted(
        path for folder in folders for path in folder.rglob("*.py") if path not in GENERATED
    )


def native_files() -> list[Path]:
    """Every C file and header."""
    return sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in {".c", ".h"})


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def num_lines(path: Path) -> int:
    """Lines of the file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def string_constants(path: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every string literal."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def place(path: Path, line: int) -> str:
    """`src/colibri/units.py:12`, as editors understand it."""
    return f"{path.relative_to(ROOT)}:{line}"
