"""OLMoE: q/k norm over the whole projection, optional clipping, every layer sparse."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import MoEConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(MoEConfig):
    """`intermediate_size` is the width of one expert."""

    intermediate_size: int
    norm_topk_prob: bool = False
    attention_bias: bool = False
    clip_qkv: float | None = None


def layer(cfg: Config, index: int) -> Layer:
    """All layers are alike."""
    attention = GroupedQueryAttention.from_config(
        cfg,
        qk_norm="projection",
        clip=cfg.clip_qkv,
        qkv_bias=cfg.attention_bias,
        o_bias=cfg.attention_bias,
    )
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=cfg.norm_topk_prob),
        intermediate_size=cfg.intermediate_size,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="olmoe",
    config=Config,
    layer=layer,
    gguf=(Gguf(architecture="olmoe"),),
    tiny={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        "num_key_value_heads": 4,
    },
)
