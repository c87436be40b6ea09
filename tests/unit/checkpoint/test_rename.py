"""Names become canonical without collisions, and every tensor is accounted for."""

from pathlib import Path

import pytest

from colibri.checkpoint.rename import Census, Renaming
from colibri.checkpoint.safetensors import TensorSpec
from colibri.errors import CheckpointError, IncompleteModelError


def spec(name: str, shape: tuple[int, ...] = (2, 3), file: str = "m.safetensors") -> TensorSpec:
    return TensorSpec(name, "F32", shape, Path(file), 8, 24)


def specs(*names: str) -> dict[str, TensorSpec]:
    return {name: spec(name) for name in names}


def test_rules_apply_in_turn() -> None:
    renaming = Renaming([(r"^model\.text\.", "model."), (r"\.moe\.", ".mlp."), ("^head$", "lm")])
    names = {
        "model.text.layers.0.moe.w1": "model.layers.0.mlp.w1",
        "model.layers.0.moe.moe.w2": "model.layers.0.mlp.moe.w2",
        "head": "lm",
        "the.head": "the.head",
    }
    renamed = renaming.apply(specs(*names))
    assert {spec.name: name for name, spec in renamed.items()} == names


def test_groups_in_replacements() -> None:
    renaming = Renaming([(r"^h\.(\d+)\.", r"model.layers.\1.")])
    assert renaming.name("h.12.norm") == "model.layers.12.norm"


def test_no_rules_keep_every_name() -> None:
    assert Renaming([]).apply(specs("a", "b")) == specs("a", "b")


def test_collisions_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'x\.a' .* and 'a' .* both mean 'a'"):
        Renaming([(r"^x\.", "")]).apply(specs("x.a", "a"))


def test_take() -> None:
    census = Census(specs("a", "b"))
    assert "a" in census
    assert census.get("a") is census.take("a", (2, 3))
    assert census.get("c") is None
    assert len(census) == 2
    with pytest.raises(CheckpointError, match=r"'b': wanted shape .3, 2., found .2, 3."):
        census.take("b", (3, 2))
    with pytest.raises(CheckpointError, match="'a' is wanted twice"):
        census.take("a", (2, 3))


def test_messages_use_the_names_on_disk() -> None:
    census = Census(Renaming([("^disk", "canonical")]).apply(specs("disk.a")))
    with pytest.raises(CheckpointError, match=r"m\.safetensors: tensor 'disk\.a'"):
        census.take("canonical.a", (1,))
    with pytest.raises(CheckpointError, match=r"'disk\.a' \[2, 3\] \(m\.safetensors\)"):
        census.finish(())


def test_a_missing_tensor_comes_with_counts() -> None:
    census = Census(specs("model.layers.1.a", "model.layers.1.b", "model.layers.11.a"))
    wanted = r"'model\.layers\.1\.c' \[4\] is missing.*0 among the 3 .* 2 of them under"
    with pytest.raises(IncompleteModelError, match=wanted):
        census.take("model.layers.1.c", (4,))
    with pytest.raises(IncompleteModelError, match=r"'norm' .* is missing"):
        census.take("norm", (4,))


def test_finish_wants_every_tensor_taken_or_ignored() -> None:
    census = Census(specs("a", "mtp.0", "mtp.1", "not.mtp.2"))
    census.take("a", (2, 3))
    with pytest.raises(CheckpointError, match=r"1 of 4 tensors .*'not\.mtp\.2'"):
        census.finish([r"mtp\."])
    with pytest.raises(CheckpointError, match="3 of 4 tensors"):
        census.finish([])
    census.finish([r"mtp\.", "not"])


def test_finish_lists_ten_names() -> None:
    names = [f"t{i:02}" for i in range(25)]
    with pytest.raises(CheckpointError, match=r"25 of 25 .*'t09'.* and 15 more") as caught:
        Census(specs(*names)).finish([])
    assert "t10" not in str(caught.value)
