"""Qwen3, dense: q/k norm over each head; every layer reads all of its weights for each token."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import WindowedConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """Windows are those of Qwen2: by layer, or in the layers from `max_window_layers` on."""

    intermediate_size: int
    attention_bias: bool = False


def layer(cfg: Config, index: int) -> Layer:
    """Layers differ in their window alone."""
    attention = GroupedQueryAttention.from_config(
        cfg,
        qk_norm="head",
        qkv_bias=cfg.attention_bias,
        o_bias=cfg.attention_bias,
        window=cfg.window(index),
    )
    return Layer(attention, DenseFFN.from_config(cfg))


FAMILY = Family(
    model_type="qwen3",
    config=Config,
    layer=layer,
    dialect="json-tags",
    gguf=(Gguf(architecture="qwen3"),),
    tiny={
        "intermediate_size": 112,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
)
