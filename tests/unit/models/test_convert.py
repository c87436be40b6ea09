"""`convert_model` knows which tensors of a family are experts and which may be coded."""

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.conversion import HEADS
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.importance import LayerImportance, read_importance, write_importance
from colibri.checkpoint.index import Checkpoint
from colibri.errors import (
    CheckpointError,
    IncompleteModelError,
    NumericsError,
    UnsupportedModelError,
)
from colibri.models import glm4_moe, llama
from colibri.models.blueprint import Blueprint
from colibri.models.convert import convert_model
from colibri.models.description import Description
from colibri.models.family import Family
from colibri.nn.parameter import ROUNDED
from tests.tiny import FAMILIES, PLAIN, each_family, each_sparse, num_heads, write_tiny


@each_family
def test_a_family_becomes_a_container(family: Family, tmp_path: Path) -> None:
    write_tiny(tmp_path / "from", family)
    convert_model(tmp_path / "from", tmp_path / "to", experts="int4-g32", dense="int8-g64")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    assert description.checkpoint.container is not None
    assert description.checkpoint.container.family == family.model_type
    for layer in description.experts.layers:
        assert {part.format.name for part in layer.parts} == {"int4-g32"}
    biased = [layer.biased for layer in description.blueprint.expert_layers()]
    assert [layer.biases is not None for layer in description.experts.layers] == biased
    for tensor in description.dense:
        wanted = {"matrix": "int8-g64", "embedding": "int8-g64", "ids": "i64"}
        assert tensor.stored.name == wanted.get(tensor.parameter.kind, "f32")


@each_sparse
def test_biases_are_looked_at_as_they_land(family: Family, tmp_path: Path) -> None:
    if not any(layer.biased for layer in Blueprint.of(family.tiny_config()).expert_layers()):
        return
    convert_model(write_tiny(tmp_path / "from", family), tmp_path / "to")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    layout = description.experts.layers[0]
    assert layout.biases is not None
    read = description.experts.reads(layout.layer, 1)[0]
    with description.experts.files[read.file].open("r+b") as file:
        file.seek(read.offset + layout.biases[2])
        file.write(np.float32(np.nan).tobytes())
    for kernels in ("auto", "reference"):
        with (
            LLM.open(tmp_path / "to", verify_reads=False, kernels=kernels, warm_start=False) as llm,
            pytest.raises(NumericsError, match=r"down_proj of expert 1 .* holds a scale or bias"),
        ):
            llm.logits(np.arange(100, dtype=np.int32))


def written_importance(model: Path, path: Path) -> Path:
    """Made up, for the layers that `coli eval` would run."""
    rng, found = np.random.default_rng(3), {}
    layers = Description.of(Checkpoint.open(model)).experts.layers
    for layout in layers:
        gate, _, down = layout.parts
        count = layout.num_experts
        sums = [
            np.exp(3 * rng.standard_normal((count, part.columns))).astype(np.float32)
            for part in (gate, down)
        ]
        found[layout.layer] = LayerImportance(np.full(count, 7), *sums)
    write_importance(path, found)
    return path


def experts_of(model: Path) -> dict[tuple[int, int], list[np.ndarray]]:
    index = Description.of(Checkpoint.open(model)).experts
    return {
        (layout.layer, expert): [
            part.format.decode(data, (part.rows, part.columns))
            for part, data in zip(layout.parts, read_expert(index, layout, expert), strict=False)
        ]
        for layout in index.layers
        for expert in range(layout.num_experts)
    }


@each_sparse
def test_importance_spares_what_matters(family: Family, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", family)
    path = written_importance(source, tmp_path / "importance")
    convert_model(source, tmp_path / "plain")
    convert_model(source, tmp_path / "weighed", importance=path)
    exact, plain, weighed = map(experts_of, (source, tmp_path / "plain", tmp_path / "weighed"))
    index = Description.of(Checkpoint.open(source)).experts
    importance, sums = read_importance(path, index), np.zeros(2)
    for (layer, expert), matrices in exact.items():
        for number, weights in enumerate(matrices):
            given = importance[layer].of(expert)[number]
            sums += [
                float((np.square(each[layer, expert][number] - weights) @ given).sum())
                for each in (plain, weighed)
            ]
    assert sums[1] < 0.9 * sums[0]
    about = Checkpoint.open(tmp_path / "weighed").container
    assert about is not None
    assert "importance" in about.manifest.source


def test_importance_leaves_drafting_heads_alone(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.mtp and family is not PLAIN)
    source = write_tiny(tmp_path / "from", family, heads=num_heads(family))
    path = written_importance(source, tmp_path / "importance")
    convert_model(source, tmp_path / "to", importance=path)
    with LLM.open(tmp_path / "to", mtp=True) as llm:
        assert llm.mtp_logits(list(range(3, 20)))


def test_importance_that_is_of_no_use_is_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", PLAIN)
    path = written_importance(source, tmp_path / "importance")
    with pytest.raises(UnsupportedModelError, match=r"no expert of .* is rounded .*leave it out"):
        convert_model(source, tmp_path / "to", experts=None, importance=path)
    with pytest.raises(CheckpointError, match="nowhere: cannot be read"):
        convert_model(source, tmp_path / "to", importance=tmp_path / "nowhere")
    assert not (tmp_path / "to").exists()


def test_other_importance_is_another_conversion(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", PLAIN)
    path = written_importance(source, tmp_path / "importance")
    convert_model(source, tmp_path / "to", importance=path)
    with pytest.raises(CheckpointError):
        convert_model(source, tmp_path / "to")


def test_without_a_dense_format_dense_tensors_stay(tmp_path: Path) -> None:
    write_tiny(tmp_path / "from", PLAIN)
    convert_model(tmp_path / "from", tmp_path / "to")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    assert list(description.formats()) == ["int4-g64", "f32"]


def test_an_unknown_format_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean 'int4-g64'"):
        convert_model(tmp_path / "from", tmp_path / "to", experts="int4-g6")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("fmt", [None, "int8-g64"])
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.mtp], ids=lambda family: family.model_type
)
def test_drafting_heads_come_along(family: Family, fmt: str | None, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", family, heads=num_heads(family))
    convert_model(source, tmp_path / "to", experts=fmt, mtp=fmt)
    checkpoint = Checkpoint.open(tmp_path / "to")
    description = Description.of(checkpoint, mtp=True)
    assert len(description.blueprint.heads) == num_heads(family)
    assert HEADS in Description.of(checkpoint).left_aside  # and the model opens without them
    heads = [t for t in description.dense if t.parameter.name.startswith("mtp.layers.")]
    rounded = {t.stored.name for t in heads if t.parameter.kind in ROUNDED}
    assert rounded == {fmt or "f32"}
    plain = Description.of(Checkpoint.open(source), mtp=True)
    assert [x.layer for x in description.experts.layers] == [x.layer for x in plain.experts.layers]


def test_drafting_heads_may_have_a_format_of_their_own_or_stay_behind(tmp_path: Path) -> None:
    family = glm4_moe.FAMILY
    source = write_tiny(tmp_path / "from", family, heads=2)
    convert_model(source, tmp_path / "to", experts="int4-g64", mtp="int8-g64")
    description = Description.of(Checkpoint.open(tmp_path / "to"), mtp=True)
    first = len(description.blueprint.layers)
    formats = {x.layer: x.parts[0].format.name for x in description.experts.layers}
    assert {formats[layer] for layer in formats if layer < first} == {"int4-g64"}
    assert {formats[layer] for layer in formats if layer >= first} == {"int8-g64"}
    convert_model(source, tmp_path / "without", mtp="none")
    with pytest.raises(IncompleteModelError, match="convert that again"):
        Description.of(Checkpoint.open(tmp_path / "without"), mtp=True)


def test_the_head_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", PLAIN)
    convert_model(source, tmp_path / "to", dense="int4-g64", head="int8-g64")
    formats = {
        tensor.parameter.name: tensor.stored.name
        for tensor in Description.of(Checkpoint.open(tmp_path / "to")).dense
    }
    assert formats["lm_head.weight"] == "int8-g64"
    assert formats["model.embed_tokens.weight"] == "int4-g64"


def test_a_tied_head_has_the_format_of_the_embedding(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "from", llama.FAMILY, tie_word_embeddings=True)
    with pytest.raises(UnsupportedModelError, match="its output matrix is the embedding"):
        convert_model(source, tmp_path / "to", head="int8-g64")
