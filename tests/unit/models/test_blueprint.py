"""A blueprint names every tensor of a checkpoint, and the largest step of its model."""

import re
from typing import Any

import pytest

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families
from colibri.nn.trunk import EMBEDDING, LM_HEAD
from tests.tiny import SPELLINGS, dense_tensors, each_family, each_sparse, expert_tensors

FAMILIES = all_families()


def blueprint(family: Family, **changes: Any) -> Blueprint:
    """Of the tiny config with changes."""
    return Blueprint.of(family.tiny_config(**changes))


@each_family
def test_parameters_follow_the_forward_pass(family: Family) -> None:
    found = blueprint(family)
    names = [p.name for p in found.parameters()]
    assert len(set(names)) == len(names)
    assert (names[0], names[-1]) == (EMBEDDING, LM_HEAD)
    numbers = [int(has[1]) for n in names if (has := re.match(r"model\.layers\.(\d+)\.", n))]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2}
    around = [*found.trunk.first_parameters(), *found.trunk.last_parameters()]
    assert len(numbers) == len(names) - len(around)


@each_family
def test_a_tied_model_has_no_head_of_its_own(family: Family) -> None:
    tied, own = (blueprint(family, tie_word_embeddings=tie) for tie in (True, False))
    if not tied.trunk.tied:
        assert family.model_type.startswith("inkling")  # which publishes both matrices always
        assert tied.parameters() == own.parameters()
        return
    assert [p for p in own.parameters() if p not in tied.parameters()] == own.parameters()[-1:]
    assert LM_HEAD not in [p.name for p in tied.parameters()]
    assert any(re.fullmatch(pattern, LM_HEAD) for pattern in tied.ignored())
    assert not any(re.fullmatch(pattern, LM_HEAD) for pattern in own.ignored())


@each_sparse
def test_experts_are_no_parameters(family: Family) -> None:
    found = blueprint(family)
    assert found.expert_layers()
    for layer in found.expert_layers():
        assert not [p for p in found.parameters() if p.name.startswith(f"{layer.prefix}.")]
        assert layer.prefix == f"model.layers.{layer.layer}.mlp.experts"
    assert [i for i, _ in found.sparse_layers()] == [e.layer for e in found.expert_layers()]


@pytest.mark.parametrize("spelling", SPELLINGS)
@each_family
def test_tiny_checkpoints_are_complete(family: Family, spelling: str) -> None:
    """The seeded tensors of tests have the shapes that the blueprint asks for."""
    found = blueprint(family)
    dense, experts = dense_tensors(found), expert_tensors(found, spelling)
    assert {name: value.shape for name, value in dense.items()} == {
        p.name: p.shape for p in found.parameters()
    }
    weights = sum(value.size for value in experts.values())
    assert weights == sum(
        e.num_experts
        * (
            3 * e.hidden_size * e.intermediate_size
            + (2 * e.intermediate_size + e.hidden_size if e.biased else 0)
        )
        for e in found.expert_layers()
    )


@each_family
def test_limits_bound_every_layer(family: Family) -> None:
    found = blueprint(family)
    limits = found.limits(33)
    assert limits.rows == 33
    assert (limits.hidden_size, limits.vocab_size) == (64, found.config.vocab_size)
    for layer in found.layers:
        for sublayer in layer.sublayers:
            demand = sublayer.demand
            assert demand.attention_width <= limits.attention_width
            assert demand.intermediate_size <= limits.intermediate_size
            assert demand.num_experts <= limits.num_experts
            assert demand.num_experts_per_tok <= limits.num_experts_per_tok


@each_family
def test_unknown_keys_reach_the_user(family: Family) -> None:
    with pytest.raises(UnsupportedModelError, match="warp_rank"):
        blueprint(family, warp_rank=16)
    with pytest.raises(ConfigError, match="hidden_size"):
        blueprint(family, hidden_size="wide")


def test_the_text_part_of_a_larger_model_is_read() -> None:
    family = FAMILIES[0]
    nested = {"model_type": "a_wrapper", "text_config": family.tiny_config()}
    assert Blueprint.of(nested).family is family
