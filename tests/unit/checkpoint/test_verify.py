"""`verify_container` finds damage and names it."""

from pathlib import Path

import pytest

from colibri.checkpoint.verify import verify_container
from colibri.errors import CheckpointError
from tests.unit.checkpoint.containers import E, write_container


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_container_is_read_once(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify_container(write_container(tmp_path), lambda *done: told.append(done))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert (found.num_files, found.nbytes, found.num_records) == (len(sizes), sum(sizes), 2 * E)
    assert told[-1] == (sum(sizes), sum(sizes))
    assert told == sorted(told)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    container = write_container(tmp_path)
    flip(tmp_path / "experts-00004.safetensors", -5000)
    with pytest.raises(CheckpointError, match=r"experts-00004.*layer 4, expert 2: wanted CRC-32C"):
        verify_container(container)


@pytest.mark.parametrize("name", ["dense-00000", "experts-00001"])
def test_a_damaged_byte_outside_records_is_found(name: str, tmp_path: Path) -> None:
    container = write_container(tmp_path)
    path = tmp_path / f"{name}.safetensors"
    flip(path, 2000 if name == "experts-00001" else -1)  # padding of the header; the last weight
    with pytest.raises(CheckpointError, match=f"{name}.*wanted SHA-256"):
        verify_container(container)


def test_a_file_cut_after_opening_is_found(tmp_path: Path) -> None:
    container = write_container(tmp_path)
    path = tmp_path / "experts-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"layer 1, expert 2"):
        verify_container(container)
