"""Llama 2 and 3, dense: plain grouped-query attention, every weight read for each token."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import PairableConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf, is_dense
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(PairableConfig):
    """Biases are off in every published checkpoint but those of relatives."""

    intermediate_size: int
    attention_bias: bool = False
    mlp_bias: bool = False


def layer(cfg: Config, index: int) -> Layer:
    """All layers are alike."""
    attention = GroupedQueryAttention.from_config(
        cfg, qkv_bias=cfg.attention_bias, o_bias=cfg.attention_bias
    )
    return Layer(attention, DenseFFN.from_config(cfg, bias=cfg.mlp_bias))


FAMILY = Family(
    model_type="llama",
    config=Config,
    layer=layer,
    gguf=(Gguf(architecture="llama", when=is_dense, pairs=True),),
    dialect="bare-json",
    tiny={
        "intermediate_size": 112,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
)
