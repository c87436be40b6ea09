"""What is damaged in a container is made anew from its source, and nothing else is touched."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.container_manifest import MANIFEST, Manifest
from colibri.checkpoint.repair import Repaired, repair
from colibri.errors import CheckpointError
from tests.unit.checkpoint.test_convert import contents, plan, run, tensors, write_source

FILES = ("dense-00000", "dense-00001", "experts-00000", "experts-00002")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "model"
    run(source, directory)
    assert sorted(path.stem for path in directory.glob("*.safetensors")) == list(FILES)
    return directory


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "damaged"))


def mend(source: Path, directory: Path) -> Repaired:
    return repair(plan(source), directory, Manifest.read(directory / MANIFEST))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_container_is_left_alone(source: Path, damaged: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in damaged.iterdir()}
    assert mend(source, damaged) == Repaired((), ())
    assert {path: path.stat().st_mtime_ns for path in damaged.iterdir()} == times


def test_one_expert_is_made_anew_in_its_place(source: Path, whole: Path, damaged: Path) -> None:
    path = damaged / "experts-00002.safetensors"
    inode = path.stat().st_ino
    flip(path, -5000)
    assert mend(source, damaged) == Repaired(((2, 2),), ())
    assert path.stat().st_ino == inode
    assert contents(damaged) == contents(whole)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["gone", "short", "header", "last byte"])
def test_any_file_is_made_anew(
    name: str, how: str, source: Path, whole: Path, damaged: Path
) -> None:
    path = damaged / f"{name}.safetensors"
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        flip(path, 20 if how == "header" else -1)
    found = mend(source, damaged)
    assert found.records or found.files == (path.name,)
    assert contents(damaged) == contents(whole)


def test_everything_at_once(source: Path, whole: Path, damaged: Path) -> None:
    for name in FILES:
        flip(damaged / f"{name}.safetensors", -1)
    mend(source, damaged)
    assert contents(damaged) == contents(whole)


@pytest.mark.parametrize("name", FILES)
def test_another_source_repairs_nothing(name: str, damaged: Path, tmp_path: Path) -> None:
    if name == "dense-00001":  # checksums of records that are whole say what it holds
        return
    other = write_source(tmp_path / "other", {k: v + np.float32(1) for k, v in tensors().items()})
    flip(damaged / f"{name}.safetensors", -1)
    before = contents(damaged)
    with pytest.raises(CheckpointError, match="not the source that it was converted from"):
        mend(other, damaged)
    assert contents(damaged) == before
