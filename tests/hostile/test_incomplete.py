"""Checkpoints that lack something or have too much: refused with names and counts."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.experts import ExpertLayer, index_experts
from colibri.checkpoint.index import INDEX_NAME, Checkpoint
from colibri.checkpoint.rename import Census
from colibri.errors import CheckpointError, IncompleteModelError
from tests.unit.checkpoint.files import split, write, write_model

LAYERS, EXPERTS, D, F, SHARDS = 3, 4, 8, 6, 6


def model(layers: int = LAYERS) -> dict[str, np.ndarray]:
    """The smallest thing with layers, norms and experts."""
    tensors = {"model.norm.weight": np.ones(D, "<f4")}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.norm.weight"] = np.ones(D, "<f4")
        for expert in range(EXPERTS):
            for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                name = f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"
                tensors[name] = np.full(shape, expert, "<f4")
    return tensors


def load(directory: Path, layers: int = LAYERS) -> None:
    """What a loader does, without the weights."""
    census = Census(Checkpoint.open(directory).tensors)
    census.take("model.norm.weight", (D,))
    for layer in range(layers):
        census.take(f"model.layers.{layer}.norm.weight", (D,))
    index_experts(
        census,
        [
            ExpertLayer(layer, f"model.layers.{layer}.mlp.experts", EXPERTS, D, F)
            for layer in range(layers)
        ],
    )
    census.finish(())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", split(model(), SHARDS))


def shard(directory: Path, number: int) -> Path:
    return directory / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"


def without_index(directory: Path) -> None:
    (directory / INDEX_NAME).unlink()


def test_the_whole_model_loads(directory: Path) -> None:
    load(directory)
    without_index(directory)
    load(directory)


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("suffix", ["", ".part", ".incomplete"])
def test_a_missing_shard(number: int, with_index: bool, suffix: str, directory: Path) -> None:
    path = shard(directory, number)
    path.rename(path.with_name(path.name + suffix)) if suffix else path.unlink()
    if not with_index:
        without_index(directory)
    with pytest.raises(IncompleteModelError, match="found 5 of the 6 shards") as caught:
        load(directory)
    assert repr(path.name) in str(caught.value)
    assert not suffix or repr(path.name + suffix) in str(caught.value)


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.parametrize("kept", [0, 0.25, 0.75])
def test_a_cut_shard(number: int, kept: float, directory: Path) -> None:
    path = shard(directory, number)
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * kept))
    with pytest.raises(IncompleteModelError, match="cut off") as caught:
        load(directory)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_layer_missing_from_the_middle(with_index: bool, tmp_path: Path) -> None:
    tensors = {name: array for name, array in model().items() if ".layers.1." not in name}
    directory = write_model(tmp_path / "m", split(tensors, SHARDS))
    if not with_index:
        without_index(directory)
    wanted = r"'model\.layers\.1\.norm\.weight' \[8\] is missing.* found 0 .* 27 .*, 0 of them"
    with pytest.raises(IncompleteModelError, match=wanted):
        load(directory)


def test_config_says_one_layer_more(directory: Path) -> None:
    with pytest.raises(IncompleteModelError, match=r"'model\.layers\.3\.norm\.weight'"):
        load(directory, LAYERS + 1)


def test_config_says_one_layer_less(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"13 of 40 tensors .*layers\.2\..* and 3 more"):
        load(directory, LAYERS - 1)


def test_an_expert_is_missing(tmp_path: Path) -> None:
    tensors = model()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    directory = write_model(tmp_path / "m", split(tensors, SHARDS))
    wanted = r"layer 1: found 11 of 12 tensors of 4 experts.*'model\.layers\.1.*\.2\.up_proj"
    with pytest.raises(IncompleteModelError, match=wanted):
        load(directory)


def test_an_expert_too_many(tmp_path: Path) -> None:
    extra = "model.layers.1.mlp.experts.4.up_proj.weight"
    tensors = model() | {extra: np.zeros((F, D), "<f4")}
    directory = write_model(tmp_path / "m", split(tensors, SHARDS))
    with pytest.raises(CheckpointError, match=f"1 of 41 tensors have no place.*{extra}"):
        load(directory)


def test_index_and_shard_disagree(directory: Path) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    places = index["weight_map"]
    name = "model.layers.1.norm.weight"
    here = places[name]
    other = next(file for file in sorted(set(places.values())) if file != here)

    def refused(changed: dict[str, str], error: type[CheckpointError], message: str) -> None:
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(error, match=message) as caught:
            load(directory)
        assert name in str(caught.value)

    absent = places | {"model.layers.1.norm.weight_scale": here}
    refused(absent, IncompleteModelError, r"found \d of the \d tensors")
    refused(places | {name: other}, CheckpointError, here if here < other else other)
    refused({k: v for k, v in places.items() if k != name}, CheckpointError, "does not know it")


@pytest.mark.parametrize("with_index", [True, False])
def test_one_tensor_in_two_shards(with_index: bool, directory: Path) -> None:
    shards = split(model(), SHARDS)
    shards[4]["model.norm.weight"] = np.zeros(D, "<f4")
    write(shard(directory, 4), shards[4])
    if not with_index:
        without_index(directory)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is") as caught:
        load(directory)
    assert shard(directory, 4).name in str(caught.value)
    assert shard(directory, 0).name in str(caught.value)
