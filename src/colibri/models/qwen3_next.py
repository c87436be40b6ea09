"""Qwen3-Next: gated delta nets, every fourth layer gated attention; a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import StridedMoEConfig
from colibri.models.family import Family
from colibri.models.hybrid import HybridConfig
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig, StridedMoEConfig):
    """The layers' kinds, and Qwen's pattern of sparse ones."""

    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True


def layer(cfg: Config, index: int) -> Layer:
    """Projections of the delta nets are stored key head by key head."""
    mixer = cfg.mixer(index, interleaved=True)
    if not cfg.is_sparse(index):
        return Layer(mixer, DenseFFN.from_config(cfg))
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=cfg.norm_topk_prob),
        intermediate_size=cfg.moe_intermediate_size,
        shared_intermediate_size=cfg.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return Layer(mixer, moe)


FAMILY = Family(
    model_type="qwen3_next",
    config=Config,
    layer=layer,
    mtp=True,
    dialect="json-tags",
    tiny={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    },
)
