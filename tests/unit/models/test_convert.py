"""`convert_model` knows which tensors of a family are experts and which may be coded."""

from pathlib import Path

import pytest

from colibri.checkpoint.index import Checkpoint
from colibri.errors import UnsupportedModelError
from colibri.models.convert import convert_model
from colibri.models.description import Description
from colibri.models.family import Family
from tests.tiny import PLAIN, each_biased, each_written, write_tiny


@each_written
def test_a_family_becomes_a_container(family: Family, tmp_path: Path) -> None:
    write_tiny(tmp_path / "from", family)
    convert_model(tmp_path / "from", tmp_path / "to", experts="int4-g32", dense="int8-g64")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    assert description.checkpoint.container is not None
    assert description.checkpoint.container.family == family.model_type
    for layer in description.experts.layers:
        assert {part.format.name for part in layer.parts} == {"int4-g32"}
    for tensor in description.dense:
        coded = tensor.parameter.kind in ("matrix", "embedding")
        assert tensor.stored.name == ("int8-g64" if coded else "f32")


@each_biased
def test_experts_with_biases_are_refused(family: Family, tmp_path: Path) -> None:
    write_tiny(tmp_path / "from", family)
    with pytest.raises(UnsupportedModelError, match="experts with biases"):
        convert_model(tmp_path / "from", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_without_a_dense_format_dense_tensors_stay(tmp_path: Path) -> None:
    write_tiny(tmp_path / "from", PLAIN)
    convert_model(tmp_path / "from", tmp_path / "to")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    assert list(description.formats()) == ["int4-g64", "f32"]


def test_an_unknown_format_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean 'int4-g64'"):
        convert_model(tmp_path / "from", tmp_path / "to", experts="int4-g6")
    assert not (tmp_path / "to").exists()
