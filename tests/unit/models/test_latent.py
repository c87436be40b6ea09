"""Latent attention by config: sizes, which layers select, what is refused by name."""

import re
from typing import Any

import pytest

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.formats import BF16, F32
from colibri.kernels.api import KV_BLOCK
from colibri.kv import block_nbytes
from colibri.models import deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.nn.mla import MultiHeadLatentAttention

DENSE = (deepseek_v2.FAMILY, deepseek_v3.FAMILY, glm4_moe_lite.FAMILY)
SPARSE = (deepseek_v32.FAMILY, glm_moe_dsa.FAMILY)
each = pytest.mark.parametrize("family", DENSE + SPARSE, ids=lambda family: family.model_type)


def blueprint(family: Family, **changes: Any) -> Blueprint:
    return Blueprint.of(family.tiny_config(**changes))


def attention(family: Family, layer: int = 0, **changes: Any) -> MultiHeadLatentAttention:
    found = blueprint(family, **changes).layers[layer].sublayers[0]
    assert isinstance(found, MultiHeadLatentAttention)
    return found


def kinds(**changes: Any) -> str:
    """F or S for each layer of the family that shares indexers."""
    layers = blueprint(glm_moe_dsa.FAMILY, num_hidden_layers=8, **changes).layers
    indexes = [layer.sublayers[0].index for layer in layers]  # type: ignore[attr-defined]
    return "".join("S" if index.shared else "F" for index in indexes)


@pytest.mark.parametrize(("fmt", "item"), [(BF16, 2), (F32, 4)])
@each
def test_a_position_keeps_576_numbers_of_the_published_sizes(
    family: Family, fmt: Any, item: int
) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk_freq": 1}
    if family in DENSE:
        del sizes["index_topk_freq"]
    else:
        sizes["index_head_dim"] = 128
    states = blueprint(family, **sizes).states(1 << 20)
    index = 128 if family in SPARSE else 0
    assert block_nbytes(states, fmt) == 3 * KV_BLOCK * (576 + index) * item


def test_a_layer_that_follows_keeps_no_index_key() -> None:
    full, shared = (attention(glm_moe_dsa.FAMILY, layer).state.planes for layer in (0, 1))
    assert [plane.width for plane in full] == [32, 8, 16]
    assert [plane.width for plane in shared] == [32, 8]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"index_topk_freq": 1}, "FFFFFFFF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSFS"),
        ({"index_topk_pattern": "FFSSSFSS"}, "FFSSSFSS"),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "FFFF"}, "FSSSSSSS"),
    ],
)
def test_which_layers_have_an_indexer(changes: dict[str, Any], wanted: str) -> None:
    assert kinds(**changes) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_pattern": "SFFFFFFF"},
        {"index_topk_pattern": "FF"},
        {"index_topk_pattern": "FXFFFFFF"},
        {"indexer_types": ["shared"] * 8},
        {"index_topk": 0},
        {"index_head_dim": 4},
        {"layer_types": ["sliding_attention"] * 8},
    ],
)
def test_selections_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        kinds(**changes)


def test_a_family_without_shared_indexers_refuses_them() -> None:
    with pytest.raises(UnsupportedModelError, match="without an indexer"):
        blueprint(deepseek_v32.FAMILY, index_topk_freq=2)


def test_the_norms_of_latents_have_an_eps_of_their_own() -> None:
    found = attention(glm4_moe_lite.FAMILY, rms_norm_eps=1e-5)
    assert (found.norm.eps, found.latent_norm.eps) == (1e-5, 1e-6)


def test_scores_follow_yarn_where_mscale_all_dim_says_so() -> None:
    wanted = (0.1 * 0.707 * 1.3862943611198906 + 1) ** 2
    rope = attention(deepseek_v2.FAMILY).rope
    assert rope is not None
    assert rope.score_factor == pytest.approx(wanted)
    plain = attention(glm4_moe_lite.FAMILY).rope
    assert plain is not None
    assert plain.score_factor == 1


def test_pairs_and_halves() -> None:
    for interleaved, pairing in ((True, "pair"), (False, "half")):
        rope = attention(deepseek_v3.FAMILY, rope_interleave=interleaved).rope
        assert rope is not None
        assert rope.pairing == pairing
    old, new = (attention(family).index for family in SPARSE)
    assert old is not None
    assert new is not None
    assert (old.pairing, new.pairing) == ("half", "pair")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (deepseek_v3.FAMILY, {"topk_method": "greedy"}),
        (deepseek_v3.FAMILY, {"scoring_func": "softmax"}),
        (deepseek_v2.FAMILY, {"topk_method": "noaux_tc"}),
        (deepseek_v2.FAMILY, {"scoring_func": "sigmoid"}),
        (deepseek_v3.FAMILY, {"mlp_bias": True}),
        (deepseek_v3.FAMILY, {"index_topk": 2048}),
        (deepseek_v3.FAMILY, {"moe_router_dtype": "bfloat16"}),
        (deepseek_v3.FAMILY, {"qk_head_dim": 23}),
        (deepseek_v3.FAMILY, {"kv_lora_rank": 0}),
    ],
)
def test_what_is_not_computed_is_refused(family: Family, changes: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=next(iter(changes))):
        blueprint(family, **changes)


def test_routing_without_groups() -> None:
    sparse = blueprint(deepseek_v2.FAMILY, topk_method="greedy").layers[1].sublayers[1]
    route = sparse.route  # type: ignore[attr-defined]
    assert (route.num_groups, route.normalize, route.scoring) == (1, False, "softmax")


@each
def test_drafting_heads_are_left_aside(family: Family) -> None:
    patterns = blueprint(family).ignored()
    for name in ("model.layers.3.eh_proj.weight", "model.layers.4.mlp.gate.weight", "mtp.norm"):
        assert any(re.match(pattern, name) for pattern in patterns)
    assert not any(re.match(p, "model.layers.2.mlp.gate.weight") for p in patterns)
    assert not any(re.match(p, "model.layers.30.mlp.gate.weight") for p in patterns)


@each
def test_the_absorbed_matrix_is_never_coded(family: Family) -> None:
    absorbed = [p for p in blueprint(family).parameters() if p.name.endswith("kv_b_proj.weight")]
    assert [parameter.kind for parameter in absorbed] == ["absorbed"] * 3
