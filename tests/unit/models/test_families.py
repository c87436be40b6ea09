"""What is peculiar to each family, as its config says it."""

from typing import Any

import pytest

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models import gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.sublayer import Layer

FULL, SLIDING = "full_attention", "sliding_attention"


def blueprint(family: Family, **changes: Any) -> Blueprint:
    """Of the tiny config with changes."""
    return Blueprint.of(family.tiny_config(**changes))


def attention(layer: Layer) -> GroupedQueryAttention:
    """The attention of a layer."""
    (found,) = [each for each in layer.sublayers if isinstance(each, GroupedQueryAttention)]
    return found


def windows(family: Family, **changes: Any) -> list[int | None]:
    """Of all layers."""
    return [attention(layer).window for layer in blueprint(family, **changes).layers]


def moe(family: Family, **changes: Any) -> MoEFFN:
    """The first sparse layer."""
    found = (each for layer in blueprint(family, **changes).layers for each in layer.sublayers)
    return next(each for each in found if isinstance(each, MoEFFN))


def test_olmoe() -> None:
    clipped = attention(blueprint(olmoe.FAMILY, clip_qkv=8).layers[0])
    assert clipped.qk_norm == "projection"
    assert (clipped.clip, clipped.window) == (8.0, None)
    assert not clipped.qkv_bias
    biased = attention(blueprint(olmoe.FAMILY, attention_bias=True).layers[0])
    assert biased.qkv_bias
    assert biased.o_bias
    assert not moe(olmoe.FAMILY, norm_topk_prob=False).route.normalize
    assert moe(olmoe.FAMILY, norm_topk_prob=True).route.normalize
    with pytest.raises(ConfigError, match="clip_qkv = -1"):
        blueprint(olmoe.FAMILY, clip_qkv=-1)


def test_mixtral() -> None:
    assert moe(mixtral.FAMILY).route.normalize
    assert windows(mixtral.FAMILY, sliding_window=7) == [7, 7, 7]
    assert windows(mixtral.FAMILY, sliding_window=None) == [None, None, None]
    with pytest.raises(ConfigError, match="sliding_window = 0"):
        blueprint(mixtral.FAMILY, sliding_window=0)
    config = mixtral.FAMILY.tiny_config()
    config.pop("rope_theta")
    frequencies = attention(Blueprint.of(config).layers[0]).rope.inverse_frequencies
    assert frequencies[1] == pytest.approx(1e6 ** (-2 / 16))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"use_sliding_window": False, "layer_types": None}, [None, None, None]),
        ({"use_sliding_window": False, "layer_types": [FULL] * 3}, [None, None, None]),
        ({"use_sliding_window": False, "sliding_window": 0, "layer_types": None}, [None] * 3),
        ({"layer_types": [SLIDING, FULL, SLIDING]}, [24, None, 24]),
        ({"layer_types": None}, [24, None, 24]),
        ({"layer_types": None, "max_window_layers": 2}, [24, None, None]),
        ({"layer_types": None, "max_window_layers": 0}, [None, None, None]),
    ],
    ids=str,
)
def test_qwen2_moe_windows(changes: dict[str, Any], wanted: list[int | None]) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 24}
    assert windows(qwen2_moe.FAMILY, **{**sliding, **changes}) == wanted


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": False}, "layer_types"),  # says that a layer slides
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": []}, "layer_types"),
        ({"layer_types": [FULL, FULL, "chunked_attention"]}, "layer_types"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    ],
    ids=str,
)
def test_qwen2_moe_refusals(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        blueprint(qwen2_moe.FAMILY, **{"use_sliding_window": True, **changes})


def test_qwen2_moe() -> None:
    found = blueprint(qwen2_moe.FAMILY, mlp_only_layers=[0], intermediate_size=112)
    assert [type(layer.sublayers[-1]) for layer in found.layers] == [DenseFFN, MoEFFN, MoEFFN]
    assert found.layers[0].demand.intermediate_size == 112
    assert attention(found.layers[0]).qkv_bias
    assert not attention(found.layers[0]).o_bias
    assert not attention(blueprint(qwen2_moe.FAMILY, qkv_bias=False).layers[0]).qkv_bias
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    sparse = moe(qwen2_moe.FAMILY, **sizes, norm_topk_prob=False)
    assert (sparse.intermediate_size, sparse.shared_intermediate_size) == (32, 48)
    assert sparse.shared_gate
    assert not sparse.route.normalize


def test_qwen3_moe() -> None:
    found = blueprint(qwen3_moe.FAMILY, mlp_only_layers=[1], head_dim=32)
    assert [type(layer.sublayers[-1]) for layer in found.layers] == [MoEFFN, DenseFFN, MoEFFN]
    normed = attention(found.layers[0])
    assert (normed.qk_norm, normed.head_dim) == ("head", 32)
    assert normed.rope.attention_factor > 1
    assert moe(qwen3_moe.FAMILY, norm_topk_prob=True).route.normalize
    assert not moe(qwen3_moe.FAMILY, norm_topk_prob=False).route.normalize
    assert moe(qwen3_moe.FAMILY).shared_intermediate_size is None
    unused = {"use_sliding_window": False, "sliding_window": 9}
    assert windows(qwen3_moe.FAMILY, **unused) == [None] * 3
    assert windows(qwen3_moe.FAMILY, sliding_window=9, use_sliding_window=True) == [9] * 3
    with pytest.raises(ConfigError, match="sliding_window = None"):
        blueprint(qwen3_moe.FAMILY, use_sliding_window=True, sliding_window=None)


@pytest.mark.parametrize("family", [qwen2_moe.FAMILY, qwen3_moe.FAMILY], ids=["two", "three"])
def test_stride_of_sparse_layers(family: Family) -> None:
    layers = (
        {"num_hidden_layers": 6, "layer_types": None}
        if family is qwen2_moe.FAMILY
        else {"num_hidden_layers": 6}
    )
    found = blueprint(family, decoder_sparse_step=2, mlp_only_layers=[3], **layers)
    assert [index for index, _ in found.sparse_layers()] == [1, 5]
    assert [layer.layer for layer in found.expert_layers()] == [1, 5]


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.model_type)
def test_heads_rotated_in_part_are_refused_where_the_family_rotates_them_whole(
    family: Family,
) -> None:
    if family.config.partial_rotary:
        return
    whole = {"rope_theta": 1e4, "rope_scaling": None}
    assert blueprint(family, **whole, partial_rotary_factor=1.0)
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
        blueprint(family, **whole, partial_rotary_factor=0.5)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "head_dim"])
def test_absurd_counts_are_refused_before_they_size_anything(key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} = {10**12} must be"):
        blueprint(qwen3_moe.FAMILY, **{key: 10**12})


def test_gpt_oss_is_stretched_where_its_config_names_no_rope() -> None:
    """As transformers fills it in; a rope that is named counts, be it the plain one."""

    def stretched(**changes: Any) -> bool:
        config = gpt_oss.FAMILY.tiny_config()
        config = {k: v for k, v in config.items() if not k.startswith("rope")} | changes
        return Blueprint.of(config).config.rope.attention_factor > 1

    assert stretched(rope_scaling=None)
    assert stretched(rope_scaling=None, rope_theta=2e4)
    assert not stretched(rope_scaling={"rope_type": "default"})
    assert not stretched(rope_scaling=None, rope_parameters={"rope_theta": 2e4})
