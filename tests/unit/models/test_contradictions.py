"""What two keys say is said alike, or the model is refused by name; null is a value of its own."""

from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from colibri.checkpoint.config import normalize
from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models import deepseek_v4, glm5_next, inkling_text, kimi_linear, qwen4_exp
from colibri.models.blueprint import Blueprint
from colibri.models.config import SLIDING
from colibri.models.family import Family
from tests.tiny import each_family

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
COMPRESSED, DELTA, POOLED = deepseek_v4.FAMILY, kimi_linear.FAMILY, glm5_next.FAMILY
RELATIVE, STREAMED = inkling_text.FAMILY, qwen4_exp.FAMILY
ROPES = {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 4e4}}
APART: dict[str, Any] = {"rope_scaling": None, "rope_theta": None}
WRONG: list[tuple[Family, str, dict[str, Any]]] = [
    (COMPRESSED, "rope_parameters", {**APART, "rope_parameters": {**ROPES, "main": 3}}),
    (COMPRESSED, "rope_parameters", {**APART, "rope_parameters": {**ROPES, "other": {}}}),
    (COMPRESSED, "rope_parameters", {**APART, "rope_parameters": {"main": ROPES["main"]}}),
    (COMPRESSED, "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (COMPRESSED, "partial_rotary_factor", {"partial_rotary_factor": "x"}),
    (COMPRESSED, "compress_ratios", {"compress_ratios": [0, 4, 128]}),
    (COMPRESSED, "compress_ratios", {"layer_types": None, "compress_ratios": [0, 4, 128]}),
    (COMPRESSED, "compress_ratios", {"layer_types": None, "compress_ratios": [0, 4, -8]}),
    (COMPRESSED, "compress_rates", {"compress_rates": {"another": 8}}),
    (COMPRESSED, "num_hash_layers", {"num_hash_layers": -1}),
    (COMPRESSED, "num_hash_layers", {"mlp_layer_types": ["moe"] * 3}),
    (COMPRESSED, "n_shared_experts", {"n_shared_experts": -1}),
    (DELTA, "linear_num_heads", {"linear_attn_config": {"num_heads": 2}}),
    (DELTA, "layer_types", {"linear_attn_config": {"kda_layers": [2], "full_attn_layers": [1, 3]}}),
    (DELTA, "linear_attn_config", {"linear_attn_config": 5}),
    (DELTA, "linear_attn_config", {"linear_attn_config": {"another": 1}}),
    (DELTA, "linear_attn_config", {"linear_attn_config": {"kda_layers": [1, "a"]}}),
    (POOLED, "index_kpool", {"index_kpool": 3, "index_topk": 9}),
    (POOLED, "index_topk_freq", {"indexer_types": None, "index_skip_topk_offset": -1}),
    (POOLED, "n_shared_experts", {"n_shared_experts": -1}),
    (RELATIVE, "local_layer_ids", {"local_layer_ids": [1]}),
    (RELATIVE, "local_layer_ids", {"local_layer_ids": [3], "layer_types": None}),
    (RELATIVE, "dense_mlp_idx", {"dense_mlp_idx": 2}),
    (RELATIVE, "dense_mlp_idx", {"dense_mlp_idx": -1, "mlp_layer_types": None}),
    (RELATIVE, "dense_intermediate_size", {"dense_intermediate_size": 0}),
    (RELATIVE, "moe_intermediate_size", {"dense_intermediate_size": 64}),
    (COMPRESSED, "sliding_window", {"sliding_window": 1 << 31}),
    (RELATIVE, "sliding_window_size", {"sliding_window_size": 1 << 31}),
    (POOLED, "first_k_dense_replace", {"first_k_dense_replace": -1}),
    (STREAMED, "max_position_embeddings", {"max_position_embeddings": 1 << 31}),
    (STREAMED, "eos_token_id", {"eos_token_id": 512}),
]


@pytest.mark.parametrize(("family", "key", "changes"), WRONG)
def test_contradictions_are_refused_by_name(
    family: Family, key: str, changes: dict[str, Any]
) -> None:
    if key == "index_topk_freq":
        changes = {**changes, key: 4}
    with pytest.raises((ConfigError, UnsupportedModelError), match=key):
        Blueprint.of(family.tiny_config(**changes))


SAME: list[tuple[Family, dict[str, Any]]] = [
    (COMPRESSED, {"partial_rotary_factor": 0.25}),
    (COMPRESSED, {"compress_ratios": [0, 4, 8]}),
    (COMPRESSED, {"mlp_layer_types": ["hash_moe", "moe", "moe"]}),
    (POOLED, {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2, 3]}}),
    (POOLED, {"linear_attn_config": {"num_heads": 4, "gate_lower_bound": None}}),
    (RELATIVE, {"local_layer_ids": [0, 2], "dense_mlp_idx": 1}),
]


@pytest.mark.parametrize(("family", "changes"), SAME)
def test_agreement_is_taken(family: Family, changes: dict[str, Any]) -> None:
    found, plain = (Blueprint.of(family.tiny_config(**each)) for each in (changes, {}))
    assert found.layers == plain.layers


def test_rates_hold_where_kinds_are_the_usual_ones() -> None:
    rates = {SPARSE: 8, HEAVY: 16}
    changes = {"layer_types": None, "compress_rates": rates, "num_hidden_layers": 4}
    given = Blueprint.of(COMPRESSED.tiny_config(**changes))
    usual = Blueprint.of(
        COMPRESSED.tiny_config(**{**changes, "layer_types": [HEAVY, HEAVY, HEAVY, SPARSE]})
    )
    assert given.layers == usual.layers
    assert SLIDING not in rates


@each_family
def test_null_is_a_value_where_a_key_may_be_null(family: Family) -> None:
    """What is not said has the default, what is null has none."""
    whole, hints = normalize(family.tiny_config()), get_type_hints(family.config)
    for name in (f.name for f in fields(family.config) if NoneType in get_args(hints[f.name])):
        try:
            found = family.config.read({**whole, name: None})
        except ConfigError:
            continue  # by name: `test_config`
        assert getattr(found, name) is None or name == "head_dim"
