"""Imports point downwards only, and nothing escapes the check."""

import ast
import subprocess
import sys

import pytest

from tests.architecture.sources import PACKAGE, ROOT, place, python_files, tree

REGISTRY = PACKAGE / "models" / "registry.py"
LINT = """
from importlinter.cli import lint_imports
raise SystemExit(lint_imports(no_cache=True, no_logo=True))
"""


def test_the_import_line_holds() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_loader_of_the_library_stays_below_the_facade() -> None:
    """import-linter overlooks its `import colibri._native`, and with it the facade."""
    module = tree(PACKAGE / "kernels" / "library.py")
    named = {n.module for n in ast.walk(module) if isinstance(n, ast.ImportFrom)}
    named |= {a.name for n in ast.walk(module) if isinstance(n, ast.Import) for a in n.names}
    assert "colibri._native" in named
    assert "colibri" not in named


def test_every_folder_is_a_package() -> None:
    """import-linter does not look into folders without `__init__.py`."""
    folders = {path.parent for path in python_files(PACKAGE)}
    assert folders
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def dynamic_imports(module: ast.Module) -> list[int]:
    """Lines that import by a computed name, which import-linter cannot follow."""
    return [
        node.lineno
        for node in ast.walk(module)
        if (isinstance(node, ast.ImportFrom | ast.Import) and names_importlib(node))
        or (isinstance(node, ast.Name) and node.id == "__import__")
    ]


def names_importlib(node: ast.ImportFrom | ast.Import) -> bool:
    """True where `importlib` or its `import_module` comes in (metadata and resources may)."""
    if isinstance(node, ast.Import):
        return any(alias.name == "importlib" for alias in node.names)
    return node.module == "importlib" and "import_module" in {alias.name for alias in node.names}


def test_only_the_registry_imports_by_name() -> None:
    found = [
        place(path, line)
        for path in python_files(PACKAGE)
        if path != REGISTRY
        for line in dynamic_imports(tree(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import importlib\n", [1]),
        ("x = 1\nfrom importlib import import_module\n", [2]),
        ("__import__('colibri.llm')\n", [1]),
        ("from importlib import metadata\nimport importlib.resources\n", []),
    ],
)
def test_dynamic_imports_are_seen(source: str, lines: list[int]) -> None:
    assert dynamic_imports(ast.parse(source)) == lines
