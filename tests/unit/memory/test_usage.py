"""The life of a heat file: made, added to, refused, damaged, shared, impossible."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri.memory.usage import NAME, Usage

LAYERS, EXPERTS = (1, 4), 6
USES = np.array([0, 3, 0, 0, 0, 1, 0, 0, 7, 0, 0, 0])


def usage(folder: Path, model: str = "bird 1", layers: tuple[int, ...] = LAYERS) -> Usage:
    return Usage(folder, model, layers, EXPERTS)


def saved(folder: Path) -> Path:
    assert usage(folder).add(USES)
    return folder / NAME


def test_it_is_made_and_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path)
    lines = ["# colibri usage 1 2x6 bird 1", "1 1 3.000", "1 5 1.000", "4 2 7.000", "end 3"]
    assert path.read_text().splitlines() == lines
    again = usage(tmp_path)
    assert np.array_equal(again.counts.ravel(), USES)
    assert again.notes == []
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_absent_is_fine(tmp_path: Path) -> None:
    found = usage(tmp_path)
    assert not found.counts.any()
    assert found.notes == []


def test_uses_are_added_to_what_is_there_by_then(tmp_path: Path) -> None:
    one, other = usage(tmp_path), usage(tmp_path)
    assert one.add(USES)
    assert other.add(USES)
    assert np.allclose(other.counts.ravel(), 2 * USES, rtol=0.01)
    assert np.allclose(usage(tmp_path).counts, other.counts, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "layers"), [("bird 2", LAYERS), ("bird 1", (1, 4, 5)), ("bird 1 ", LAYERS)]
)
def test_that_of_another_model_is_refused_by_name(
    tmp_path: Path, model: str, layers: tuple[int, ...]
) -> None:
    before = saved(tmp_path).read_bytes()
    foreign = usage(tmp_path, model, layers)
    assert not foreign.counts.any()
    assert not foreign.add(np.ones(len(layers) * EXPERTS, int))
    assert (tmp_path / NAME).read_bytes() == before
    (note,) = foreign.notes
    for part in (str(tmp_path / NAME), "another model", "2x6 bird 1", f"x6 {model}", "delete it"):
        assert part in note


@pytest.mark.parametrize("sixteenths", range(16))
def test_cut_short_anywhere(tmp_path: Path, sixteenths: int) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * sixteenths // 16])
    found = usage(tmp_path)
    assert not found.counts.any()
    assert "is damaged" in found.notes[0]
    assert found.add(USES)
    assert path.read_bytes() == data
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    "line",
    ["9 1 2", "1 6 2", "1 -1 2", "1 1", "1 1 x", "1 1 nan", "1 1 -2", "1 1 inf", "\xff", "1  1 2"],
)
def test_a_line_that_cannot_be(tmp_path: Path, line: str) -> None:
    text = f"# colibri usage 1 2x6 bird 1\n{line}\nend 1\n"
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    assert "is damaged" in usage(tmp_path).notes[0]


def test_a_directory_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    found = usage(tmp_path)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert not found.add(USES)
    assert not found.add(USES)
    assert found.notes == [
        f"{tmp_path / NAME} cannot be written (Read-only file system): heat is not kept"
    ]
    assert np.array_equal(found.counts.ravel(), USES)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    found = usage(tmp_path)
    assert "cannot be read" in found.notes[0]
    assert not found.add(USES)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(tmp_path).read_bytes()

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    assert not usage(tmp_path).add(USES)
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


WRITER = """
import sys
from pathlib import Path
import numpy as np
from colibri.memory.usage import Usage
own = Usage(Path(sys.argv[1]), "bird 1", (1, 4), 6)
for _ in range(40):
    assert own.add(np.eye(12, dtype=np.int64)[int(sys.argv[2])])
assert not own.notes
"""


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(key)], env=os.environ)
        for key in (1, 8)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    counts = usage(tmp_path).counts.ravel()
    assert np.allclose(counts, 40 * (np.eye(12)[1] + np.eye(12)[8]), rtol=0.02)
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
