"""Qwen2-MoE: biased q, k, v; a gated shared expert; dense layers by stride and by list."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import StridedMoEConfig, WindowedConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(StridedMoEConfig, WindowedConfig):
    """Windows and dense layers by index, or as lists name them."""

    shared_expert_intermediate_size: int
    qkv_bias: bool = True

    def slides_by_index(self, index: int) -> bool:
        """Even layers below `max_window_layers`."""
        return index % 2 == 0 and index < self.max_window_layers


def layer(cfg: Config, index: int) -> Layer:
    """Attention is alike everywhere; the feed-forward is sparse or dense."""
    attention = GroupedQueryAttention.from_config(
        cfg, qkv_bias=cfg.qkv_bias, window=cfg.window(index)
    )
    if not cfg.is_sparse(index):
        return Layer(attention, DenseFFN.from_config(cfg))
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=cfg.norm_topk_prob),
        intermediate_size=cfg.moe_intermediate_size,
        shared_intermediate_size=cfg.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="qwen2_moe",
    config=Config,
    layer=layer,
    dialect="json-tags",
    gguf=(Gguf(architecture="qwen2moe"),),
    tiny={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
)
