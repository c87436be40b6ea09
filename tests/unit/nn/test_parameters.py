"""What blocks need of a checkpoint, by Hugging Face's names, and that binding uses all of it."""

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from colibri.checkpoint.experts import ExpertLayer, ExpertLayerLayout
from colibri.formats import BF16
from colibri.kernels.api import ExpertPart, Norm
from colibri.kv import KVPool, StateShape
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter
from colibri.nn.rope import Rope
from colibri.nn.route import Route
from colibri.nn.sublayer import Site
from tests.unit.nn.weights import NumberedWeights

P = "model.layers.7."
ROPE = Rope.from_parameters(
    {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, head_dim=16, max_position_embeddings=64
)


def gqa(**changes: Any) -> GroupedQueryAttention:
    """64 wide, four heads of 16, two K/V heads."""
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return GroupedQueryAttention(**{**sizes, "norm": RMSNorm(1e-6), "rope": ROPE, **changes})


def site(
    weights: NumberedWeights,
    state: StateShape | None = None,
    experts: ExpertLayerLayout | None = None,
) -> Site:
    """Layer 7 of a checkpoint that holds `weights`."""
    pool = KVPool([state or StateShape()], 1, BF16, 1)
    return Site(7, P, weights, pool.layer(0), experts)


def shapes(parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """Names without the layer's prefix, and shapes; no name twice."""
    found = {p.name.removeprefix(P): p.shape for p in parameters}
    assert len(found) == len(parameters)
    assert all(p.name.startswith(P) for p in parameters)
    return found


PLAIN = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
}
QKV_BIAS = {
    "self_attn.q_proj.bias": (64,),
    "self_attn.k_proj.bias": (32,),
    "self_attn.v_proj.bias": (32,),
}


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({"qkv_bias": True}, QKV_BIAS),
        ({"o_bias": True}, {"self_attn.o_proj.bias": (64,)}),
        (
            {"qk_norm": "head"},
            {"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)},
        ),
        (
            {"qk_norm": "projection"},
            {"self_attn.q_norm.weight": (64,), "self_attn.k_norm.weight": (32,)},
        ),
    ],
    ids=str,
)
def test_attention(changes: dict[str, Any], more: dict[str, tuple[int, ...]]) -> None:
    assert shapes(gqa(**changes).parameters(P)) == PLAIN | more


def test_a_head_need_not_be_a_share_of_the_width() -> None:
    found = shapes(gqa(head_dim=32).parameters(P))
    assert found["self_attn.q_proj.weight"] == (128, 64)
    assert found["self_attn.k_proj.weight"] == (64, 64)
    assert found["self_attn.o_proj.weight"] == (64, 128)


@pytest.mark.parametrize("qk_norm", [None, "head", "projection"])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_binds_all_of_it(
    qk_norm: Literal["head", "projection"] | None, bias: bool
) -> None:
    block = gqa(qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, clip=8.0, window=5)
    weights = NumberedWeights(block.parameters(P))
    bound = block.bind(site(weights, block.state)).layer
    assert weights.asked == weights.numbers.keys()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(bound, name)
        assert weights.number(projection) == weights.numbers[f"{P}self_attn.{name}.weight"]
        if bias:
            number = weights.numbers[f"{P}self_attn.{name}.bias"]
            assert (projection.bias == number).all()
        else:
            assert projection.bias is None
    assert (bound.num_heads, bound.num_kv_heads, bound.head_dim) == (4, 2, 16)
    assert (bound.scale, bound.clip, bound.window) == (0.25, 8.0, 5)
    assert (bound.rotary_dim, bound.rope_pairing) == (8, "half")
    for norm, name in ((bound.q_norm, "q_norm"), (bound.k_norm, "k_norm")):
        assert (norm is None) == (qk_norm is None)
        if norm is not None:
            assert norm.eps == 1e-6
            assert (norm.weight == weights.numbers[f"{P}self_attn.{name}.weight"]).all()


def test_attention_sizes() -> None:
    block = gqa()
    assert [(plane.heads, plane.width) for plane in block.state.planes] == [(2, 16), (2, 16)]
    assert block.demand.attention_width == (4 + 2 * 2) * 16


def test_attention_from_config() -> None:
    config = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        kv_heads=2,
        head_width=16,
        norm=RMSNorm(1e-6),
        rope=ROPE,
    )
    assert GroupedQueryAttention.from_config(config) == gqa()
    changes: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "qk_norm": "head"}
    changes |= {"clip": 2.0, "window": 9}
    assert GroupedQueryAttention.from_config(config, **changes) == gqa(**changes)


def test_dense_ffn() -> None:
    block = DenseFFN(hidden_size=64, intermediate_size=112, norm=RMSNorm(1e-5))
    assert shapes(block.parameters(P)) == {
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (112, 64),
        "mlp.up_proj.weight": (112, 64),
        "mlp.down_proj.weight": (64, 112),
    }
    weights = NumberedWeights(block.parameters(P))
    bound = block.bind(site(weights)).layer
    assert weights.asked == weights.numbers.keys()
    assert isinstance(bound.norm, Norm)
    assert bound.norm.eps == 1e-5
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert weights.number(getattr(bound, name)) == weights.numbers[f"{P}mlp.{name}.weight"]


def moe(**changes: Any) -> MoEFFN:
    """Eight experts of width 32."""
    sizes = {"hidden_size": 64, "norm": RMSNorm(1e-5), "num_experts": 8, "num_experts_per_tok": 2}
    return MoEFFN(**{**sizes, "intermediate_size": 32, "route": Route(normalize=True), **changes})


SHARED = {
    "mlp.shared_expert.gate_proj.weight": (48, 64),
    "mlp.shared_expert.up_proj.weight": (48, 64),
    "mlp.shared_expert.down_proj.weight": (64, 48),
}
SHARED_GATE = {"mlp.shared_expert_gate.weight": (1, 64)}


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({"shared_intermediate_size": 48}, SHARED),
        ({"shared_intermediate_size": 48, "shared_gate": True}, SHARED | SHARED_GATE),
    ],
    ids=str,
)
def test_moe(changes: dict[str, Any], more: dict[str, tuple[int, ...]]) -> None:
    block = moe(**changes)
    router = {"post_attention_layernorm.weight": (64,), "mlp.gate.weight": (8, 64)}
    assert shapes(block.parameters(P)) == router | more
    part = {
        name: ExpertPart(name, BF16, rows, columns, BF16.panel_nbytes(columns))
        for name, rows, columns in (
            ("gate_proj", 32, 64),
            ("up_proj", 32, 64),
            ("down_proj", 64, 32),
        )
    }
    parts = part["gate_proj"], part["up_proj"], part["down_proj"]
    layout = ExpertLayerLayout(7, 8, parts, (0,), 12288, (0, 0, 0), (0, 4096, 8192), 12288)
    weights = NumberedWeights(block.parameters(P))
    bound = block.bind(site(weights, experts=layout))
    assert weights.asked == weights.numbers.keys()
    assert bound.layer == 7
    assert weights.number(bound.router.gate) == weights.numbers[f"{P}mlp.gate.weight"]
    assert (bound.router.num_experts_per_tok, bound.router.normalize) == (2, True)
    assert bound.router.norm.eps == 1e-5
    found = bound.experts.gate_proj, bound.experts.up_proj, bound.experts.down_proj
    assert found == parts
    assert (bound.experts.shared is not None) == ("shared_intermediate_size" in changes)
    assert (bound.experts.shared_gate is not None) == ("shared_gate" in changes)
    if bound.experts.shared is not None:
        assert bound.experts.shared.norm is None


def test_routed_experts_are_asked_for_by_prefix() -> None:
    assert moe().expert_layer(7, P) == ExpertLayer(7, f"{P}mlp.experts", 8, 64, 32)


def test_kinds_of_parameters() -> None:
    """What a conversion must leave alone, and what is resident as float32."""
    block = moe(shared_intermediate_size=48, shared_gate=True)
    found = [*gqa(qkv_bias=True, qk_norm="head").parameters(P), *block.parameters(P)]
    kinds: dict[str, str] = {p.name.removeprefix(P): p.kind for p in found}
    assert {kind for name, kind in kinds.items() if name.endswith("norm.weight")} == {"norm"}
    assert {kind for name, kind in kinds.items() if name.endswith(".bias")} == {"bias"}
    routers = [name for name, kind in kinds.items() if kind == "router"]
    assert routers == ["mlp.gate.weight", "mlp.shared_expert_gate.weight"]
    matrices = [name for name, kind in kinds.items() if kind == "matrix"]
    assert all(np.size(name) and name.endswith("_proj.weight") for name in matrices)
    assert len(matrices) == 7
