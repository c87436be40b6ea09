"""DeepSeek-V4: four streams, keys that heads share, compressed entries, experts by token id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.compressed import AS_PUBLISHED, PUBLISHED, TINY, CompressedConfig
from colibri.models.family import Family
from colibri.models.hashed import HashedMoEConfig
from colibri.models.latent import YARN
from colibri.models.streams import StreamsConfig, weighed_trunk
from colibri.nn.hyper import hyper_connected
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(StreamsConfig, CompressedConfig, HashedMoEConfig):
    """Attention and experts between streams; all experts' inputs are clamped."""

    unused_keys: ClassVar[frozenset[str]] = frozenset({"expert_dtype"})  # tensors say it themselves


def layer(cfg: Config, index: int) -> Layer:
    """Every layer is sparse."""
    plain = Layer(cfg.attention(index), cfg.feed_forward(index, cfg.swiglu))
    return hyper_connected(plain, cfg.streams)


FAMILY = Family(
    model_type="deepseek_v4",
    config=Config,
    layer=layer,
    trunk=weighed_trunk,
    rename=PUBLISHED,
    spelling="w1w3w2",
    unrename=AS_PUBLISHED,
    dialect="dsml",
    tiny={
        **TINY,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "swiglu_limit": 1.5,
        "num_hash_layers": 1,
        "rope_scaling": {key: value for key, value in YARN.items() if "mscale" not in key},
    },
)
