"""Which files are the model, and where its tensors lie."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.container_writer import ContainerWriter
from colibri.checkpoint.experts import ExpertLayer
from colibri.checkpoint.index import INDEX_NAME, Checkpoint
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors import read_tensor
from colibri.errors import CheckpointError
from colibri.formats import BF16, F32, FORMATS
from tests.unit.checkpoint.files import split, write, write_model

TENSORS = {f"model.layers.{i}.weight": np.full((2, 3), i, "<f4") for i in range(9)}


def check_tensors(checkpoint: Checkpoint) -> None:
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert read_tensor(checkpoint.tensors[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("num_shards", [1, 2, 6])
@pytest.mark.parametrize("with_index", [True, False])
def test_any_number_of_shards(num_shards: int, with_index: bool, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", split(TENSORS, num_shards), {"hidden_size": 3})
    if not with_index:
        (directory / INDEX_NAME).unlink()
    checkpoint = Checkpoint.open(directory)
    check_tensors(checkpoint)
    assert checkpoint.config == {"hidden_size": 3}
    assert checkpoint.directory == directory
    assert checkpoint.ignored_files == ()
    assert checkpoint.container is None


def test_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", TENSORS)
    check_tensors(Checkpoint.open(str(tmp_path)))


@pytest.mark.parametrize("with_index", [True, False])
def test_other_files_beside_the_shards_are_listed(with_index: bool, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", split(TENSORS, 2))
    if not with_index:
        (directory / INDEX_NAME).unlink()
    golden = directory / "golden.safetensors"
    golden.write_bytes(b"not even a header")
    checkpoint = Checkpoint.open(directory)
    check_tensors(checkpoint)
    assert checkpoint.ignored_files == (golden,)


def test_with_an_index_other_model_files_are_not_read(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", split(TENSORS, 2))
    other = write(directory / "model.safetensors", TENSORS)
    checkpoint = Checkpoint.open(directory)
    check_tensors(checkpoint)
    assert checkpoint.ignored_files == (other,)


def test_linked_files_are_followed(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", split(TENSORS, 2))
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in directory.iterdir():
        (linked / path.name).symlink_to(path)
    check_tensors(Checkpoint.open(linked))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "found no weights.*fetch the safetensors"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"found only 'pytorch_model\.bin'"),
        ({"config.json": "{}", "golden.safetensors": ""}, r"found only 'golden\.safetensors'"),
        ({"config.json": "{}", "model.safetensors.part": ""}, r"unfinished.*'model\.safet.*part'"),
        ({"config.json": "{}", "dense-00000.safetensors": ""}, "conversion that was not finished"),
        ({"config.json": "[]"}, r"config\.json: wanted a JSON object"),
        ({"config.json": '{"a": 1, "a": 2}'}, r"config\.json: .*'a' stands there twice"),
    ],
)
def test_not_a_checkpoint(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map: wanted"),
        ({"weight_map": []}, "weight_map: wanted"),
        ({"weight_map": {}}, "weight_map: wanted"),
        ({"weight_map": {"a": 1}}, "'a'"),
        ({"weight_map": {"a": "../other.safetensors"}}, "'a'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'a'"),
        ({"weight_map": {"a": "model.bin"}}, "'a'"),
        ({"weight_map": {"a": "a\0.safetensors"}}, "'a'"),
    ],
)
def test_a_broken_index(index: object, message: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", split(TENSORS, 2))
    (directory / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_a_container_opens_as_its_dense_tensors(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, family="any", source={})
    layout = RecordLayout.uniform(BF16, 8, 4)
    gate, down = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
    with writer.layer(1, 2, layout) as layer:
        layer.add(0, gate, gate, down)
        layer.add(1, gate, gate, down)
    writer.dense("model.norm.weight", np.arange(8, dtype=np.float32), F32)
    writer.dense("lm_head.weight", np.ones((8, 64), np.float32), FORMATS["int4-g64"])
    writer.finish({"hidden_size": 8})
    (tmp_path / "golden.safetensors").touch()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == {"hidden_size": 8}
    assert checkpoint.tensors.keys() == {"model.norm.weight", "lm_head.weight"}
    assert checkpoint.ignored_files == (tmp_path / "golden.safetensors",)
    assert checkpoint.container is not None
    assert checkpoint.container.coded.keys() == {"lm_head.weight"}
    index = checkpoint.container.expert_index([ExpertLayer(1, "unused", 2, 8, 4)])
    assert index.reads(1, 1) == [(0, index.offset[0, 1, 0], layout.nbytes, 0)]
