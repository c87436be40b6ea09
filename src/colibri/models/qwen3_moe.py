"""Qwen3-MoE: q/k norm over each head, no shared expert; dense layers by stride and by list."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import StridedMoEConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(StridedMoEConfig):
    """A window, where it is used, holds for every layer."""

    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None

    def check(self) -> None:
        """A window that is used is given."""
        super().check()
        given = not self.use_sliding_window or (self.sliding_window or 0) > 0
        self.require(given, "sliding_window", "must be positive where use_sliding_window is true")


def layer(cfg: Config, index: int) -> Layer:
    """Attention is alike everywhere; the feed-forward is sparse or dense."""
    attention = GroupedQueryAttention.from_config(
        cfg,
        qk_norm="head",
        qkv_bias=cfg.attention_bias,
        o_bias=cfg.attention_bias,
        window=cfg.sliding_window if cfg.use_sliding_window else None,
    )
    if not cfg.is_sparse(index):
        return Layer(attention, DenseFFN.from_config(cfg))
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=cfg.norm_topk_prob),
        intermediate_size=cfg.moe_intermediate_size,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="qwen3_moe",
    config=Config,
    layer=layer,
    dialect="json-tags",
    gguf=(Gguf(architecture="qwen3moe", config={"norm_topk_prob": True}),),
    tiny={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
)
