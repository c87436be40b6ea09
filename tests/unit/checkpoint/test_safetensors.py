"""Sound files are read as they are; reads are whole or an error."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.checkpoint.safetensors import TensorSpec, read_header, read_into, read_tensor
from colibri.errors import CheckpointError
from tests.unit.checkpoint.files import entries, raw_file, write

TENSORS = {
    "a.weight": np.arange(12, dtype="<f4").reshape(3, 4),
    "scalar": np.array(7, "<f4"),
    "empty": np.zeros((0, 8), "<f2"),
    "codes": np.arange(5, dtype="u1"),
    "half": np.arange(6, dtype="<u2").reshape(2, 3),
}


def test_header_gives_places(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", TENSORS)
    specs = read_header(path)
    start = path.stat().st_size - sum(array.nbytes for array in TENSORS.values())
    assert list(specs) == list(TENSORS)
    assert specs["a.weight"] == TensorSpec("a.weight", "F32", (3, 4), path, start, 48)
    assert specs["scalar"].shape == ()
    assert specs["empty"].nbytes == 0
    assert specs["half"].dtype == "BF16"


@given(blanks=st.integers(0, 70), order=st.permutations(list(TENSORS)))
def test_bytes_come_back(
    blanks: int, order: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    specs = read_header(write(path, {name: TENSORS[name] for name in order}, blanks))
    for name, array in TENSORS.items():
        found = read_tensor(specs[name])
        assert found.tobytes() == array.tobytes()
        assert not array.nbytes or found.ctypes.data % 64 == 0


def test_header_order_need_not_be_file_order(tmp_path: Path) -> None:
    header = dict(reversed(entries(TENSORS).items()))
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_file(header, b"".join(array.tobytes() for array in TENSORS.values())))
    for name, spec in read_header(path).items():
        assert read_tensor(spec).tobytes() == TENSORS[name].tobytes()


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_file({"__metadata__": {"format": "pt"}}))
    assert read_header(path) == {}


def test_a_file_that_shrank(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", TENSORS)
    spec = read_header(path)["half"]
    with path.open("r+b") as file:
        file.truncate(spec.offset + 3)
    for read in (read_tensor, lambda spec: read_into(spec, np.empty(spec.nbytes, np.uint8))):
        with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'half': .*changed"):
            read(spec)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read"):
        read_tensor(spec)


def test_a_huge_tensor_of_a_shrunken_file_allocates_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", TENSORS)
    spec = TensorSpec("big", "U8", (2**60,), path, 8, 2**60)
    with pytest.raises(CheckpointError, match="'big'"):
        read_tensor(spec)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.safetensors", TENSORS)
    spec = read_header(path)["a.weight"]
    real_open = Path.open

    class Trickle:
        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> "Trickle":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def readinto(self, view: memoryview) -> int:
            return self.file.readinto(view[:5])

    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Trickle(real_open(self, *a, **k)))
    assert read_tensor(spec).tobytes() == TENSORS["a.weight"].tobytes()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path, problem in [
        (tmp_path / "absent.safetensors", "No such file"),
        (tmp_path / "pipe.safetensors", "not a regular file"),
        (tmp_path, "not a regular file"),
    ]:
        with pytest.raises(CheckpointError, match=problem) as caught:
            read_header(path)
        assert str(path) in str(caught.value)
