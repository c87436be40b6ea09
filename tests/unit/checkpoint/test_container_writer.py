"""What a container looks like while it is written, and after a kill."""

from pathlib import Path
from typing import Any

import pytest

from colibri.checkpoint.container import open_container
from colibri.checkpoint.container_manifest import PROGRESS
from colibri.checkpoint.container_writer import ContainerWriter, require_free
from colibri.checkpoint.record import RecordLayout
from colibri.errors import CheckpointError, IncompleteModelError
from tests.unit.checkpoint.containers import (
    CONFIG,
    INT4,
    INT8,
    LAYERS,
    SOURCE,
    D,
    E,
    F,
    matrices,
    opened,
    write_dense,
    write_layer,
)


def test_nothing_opens_before_the_end(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, family="any", source=SOURCE)
    write_layer(writer, 1, RecordLayout.uniform(INT4, D, F))
    with pytest.raises(IncompleteModelError, match="not finished"):
        open_container(tmp_path)
    writer.finish(CONFIG)
    assert opened(tmp_path).records.keys() == {1}
    assert not (tmp_path / PROGRESS).exists()


def interrupted_layer(writer: ContainerWriter, layer: int, layout: RecordLayout) -> None:
    with writer.layer(layer, E, layout) as out:
        out.add(0, *matrices(layer, 0))
        raise KeyboardInterrupt


def test_a_killed_writer_is_resumed(pristine: Path, tmp_path: Path) -> None:
    layout = RecordLayout.uniform(INT4, D, F)
    killed = ContainerWriter(tmp_path, family="any", source=SOURCE)
    write_layer(killed, LAYERS[0], layout)
    with pytest.raises(KeyboardInterrupt):
        interrupted_layer(killed, LAYERS[1], layout)
    (tmp_path / "experts-00004.safetensors.part").touch()  # as a kill would leave it
    kept = (tmp_path / "experts-00001.safetensors").stat().st_ino
    del killed  # and what it held, as a kill would

    writer = ContainerWriter(tmp_path, family="any", source=SOURCE)
    assert not list(tmp_path.glob("*.part"))
    assert writer.has_layer(LAYERS[0], E, layout)
    assert not writer.has_layer(LAYERS[0], E, RecordLayout.uniform(INT8, D, F))
    assert not writer.has_layer(LAYERS[1], E, layout)
    write_layer(writer, LAYERS[1], layout)
    write_dense(writer)
    writer.finish(CONFIG)

    assert (tmp_path / "experts-00001.safetensors").stat().st_ino == kept
    files = {path.name: path.read_bytes() for path in pristine.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_file_is_written_again(damage: str, tmp_path: Path) -> None:
    layout = RecordLayout.uniform(INT4, D, F)
    write_layer(ContainerWriter(tmp_path, family="any", source=SOURCE), 1, layout)
    path = tmp_path / "experts-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:-1])
    if damage == "gone":
        path.unlink()
    writer = ContainerWriter(tmp_path, family="any", source=SOURCE)
    assert not writer.has_layer(1, E, layout)
    assert not path.exists()


@pytest.mark.parametrize(
    "other",
    [
        {"family": "other", "source": SOURCE},
        {"family": "any", "source": {"name": "other"}},
        {"family": "any", "source": SOURCE, "revision": "2"},
    ],
    ids=["family", "source", "revision"],
)
def test_another_source_is_not_mixed_in(other: dict[str, Any], tmp_path: Path) -> None:
    ContainerWriter(tmp_path, family="any", source=SOURCE)
    with pytest.raises(CheckpointError, match="unfinished conversion"):
        ContainerWriter(tmp_path, **other)


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    with ContainerWriter(tmp_path, family="any", source=SOURCE):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointError, match="another conversion is writing here"):
            ContainerWriter(tmp_path, family="any", source=SOURCE)
        assert sorted(tmp_path.iterdir()) == before
    with ContainerWriter(tmp_path, family="any", source=SOURCE) as writer:
        writer.finish(CONFIG)


def test_a_directory_in_use_is_left_alone(container_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="finished container"):
        ContainerWriter(container_dir, family="any", source=SOURCE)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(CheckpointError, match="other files"):
        ContainerWriter(tmp_path / "photos", family="any", source=SOURCE)


def test_experts_come_in_order_and_all_of_them(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, family="any", source=SOURCE)
    layout = RecordLayout.uniform(INT4, D, F)
    with pytest.raises(ValueError, match="not ascending"), writer.layer(1, E, layout) as out:
        out.add(1, *matrices(1, 1))
    with pytest.raises(ValueError, match="1 of 3"), writer.layer(1, E, layout) as out:
        out.add(0, *matrices(1, 0))
    gate, up, down = matrices(1, 0)
    with pytest.raises(ValueError, match="up_proj is"), writer.layer(1, E, layout) as out:
        out.add(0, gate, up.T, down)
    assert not list(tmp_path.glob("experts-*"))


def test_a_small_disk_is_refused(tmp_path: Path) -> None:
    require_free(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError, match="are free"):
        require_free(tmp_path, 1 << 60)
