"""A model's heat and conversations are its own: another of equal sizes has another name."""

from pathlib import Path

from colibri.checkpoint.index import Checkpoint
from colibri.llm.heat_keeper import model_identity
from colibri.models.description import Description
from colibri.models.family import Family
from tests.tiny import PLAIN, each_family, write_tiny


def identity(path: Path) -> str:
    return model_identity(Description.of(Checkpoint.open(path)))


@each_family
def test_fine_tunes_of_equal_sizes_differ(tmp_path: Path, family: Family) -> None:
    first = write_tiny(tmp_path / "first", family)
    tuned = write_tiny(tmp_path / "tuned", family, seed=1)
    assert identity(first) != identity(tuned)


def test_a_folder_that_moves_keeps_its_name(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "first", PLAIN)
    named = identity(first)
    assert identity(first.rename(tmp_path / "second")) == named
