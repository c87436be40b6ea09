"""What is remembered of reading ahead, and what is made of damaged files."""

import json
from pathlib import Path

import pytest

from colibri.memory.governor import Trial
from colibri.memory.verdicts import NAME, Verdicts


def probed(verdicts: Verdicts, pays: bool, gained: float) -> None:
    verdicts.governor.first = Trial(pays, gained)
    verdicts.save()


def test_a_verdict_is_kept_by_model_and_slots(tmp_path: Path) -> None:
    probed(Verdicts(tmp_path, "a", 100), True, 0.125)
    probed(Verdicts(tmp_path, "a", 200), False, -0.5)
    found = Verdicts(tmp_path, "a", 100).governor.first
    assert (found.pays, found.gain, found.choice) == (True, 0.125, True)
    assert not Verdicts(tmp_path, "a", 200).governor.first.pays
    for model, slots in (("b", 100), ("a", 101)):
        assert Verdicts(tmp_path, model, slots).governor.first.gain is None


def test_nothing_is_written_before_there_is_a_verdict(tmp_path: Path) -> None:
    Verdicts(tmp_path, "a", 100).save()
    assert not list(tmp_path.iterdir())


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    for slots in range(100, 140):
        probed(Verdicts(tmp_path, "a", slots), True, 0.125)
    assert len(json.loads((tmp_path / NAME).read_text())["slots"]) == 16


GOOD = {
    "title": "colibri prefetch 1",
    "model": "a",
    "slots": {"8": {"one": {"pays": True, "gain": 0.5}}},
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps(GOOD | {"title": "x"}),
        json.dumps(GOOD | {"slots": []}),
        json.dumps(GOOD | {"slots": {"8": []}}),
        json.dumps(GOOD | {"slots": {"8": {"one": {"pays": 1, "gain": 0.5}}}}),
        json.dumps(GOOD | {"slots": {"8": {"one": {"pays": True, "gain": float("nan")}}}}),
    ],
)
def test_a_damaged_file_says_nothing_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(json.dumps(GOOD))
    assert Verdicts(tmp_path, "a", 8).governor.first.pays
    (tmp_path / NAME).write_text(text)
    verdicts = Verdicts(tmp_path, "a", 8)
    assert verdicts.governor.first.gain is None
    probed(verdicts, False, 0.0)
    assert Verdicts(tmp_path, "a", 8).governor.first.gain == 0.0


def test_a_folder_that_cannot_be_written_is_fine(tmp_path: Path) -> None:
    probed(Verdicts(tmp_path / "absent", "a", 8), True, 0.5)
    assert not (tmp_path / "absent").exists()
