"""A module is named for what it does."""

from tests.architecture.sources import PACKAGE, ROOT, python_files

EMPTY_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}


def test_no_module_is_named_for_nothing() -> None:
    files = python_files(PACKAGE, ROOT / "tests", ROOT / "tools")
    assert files
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if EMPTY_WORDS & {word for part in path.relative_to(ROOT).parts for word in words(part)}
    ]
    assert found == []


def words(part: str) -> list[str]:
    """`file_utils.py` -> `file`, `utils`."""
    return part.removesuffix(".py").split("_")
