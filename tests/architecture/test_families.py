"""A family's name stands in its own file and nowhere else: what works for one works for all."""

import sys
from pathlib import Path

from colibri.models.registry import all_families
from tests.architecture.sources import PACKAGE, ROOT, place, python_files, string_constants

# Also ordinary words: tensor layouts, prompt formats and tokenizers are called so.
ORDINARY_WORDS = {"llama", "mixtral", "jamba"}


def homes() -> dict[str, Path]:
    """Each family's names and the file that defines it."""
    found: dict[str, Path] = {}
    for family in all_families():
        path = defining_file(family)
        found |= dict.fromkeys((family.model_type, *family.aliases), path)
    return found


def defining_file(family: object) -> Path:
    """The module whose `FAMILY` this is."""
    for module in tuple(sys.modules.values()):
        if getattr(module, "FAMILY", None) is family and module.__file__:
            return Path(module.__file__).resolve()
    raise AssertionError(f"no imported module has {family!r} as its FAMILY")


def test_family_names_stay_at_home() -> None:
    home = {name: path for name, path in homes().items() if name not in ORDINARY_WORDS}
    assert home
    strays = [
        f"{place(path, line)}: {value!r}"
        for path in python_files(PACKAGE, ROOT / "tests")
        if "goldens" not in path.parts
        for line, value in string_constants(path)
        if value in home and path != home[value]
    ]
    assert strays == []


def test_every_family_has_a_file_of_its_own() -> None:
    families = all_families()
    assert len({defining_file(family) for family in families}) == len(list(families))
