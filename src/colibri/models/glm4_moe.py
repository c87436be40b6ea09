"""GLM-4.5 to 4.7: biased q, k, v, half of each head rotated, DeepSeek-V3's router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.family import Family
from colibri.models.gguf_names import Gguf
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS, NoauxMoEConfig
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(NoauxMoEConfig):
    """Norms of q and k are a matter of the checkpoint's size."""

    attention_bias: bool = False
    use_qk_norm: bool = False

    partial_rotary: ClassVar[bool] = True

    @property
    def rotary_share(self) -> float:
        """Half of a head."""
        return 0.5


def layer(cfg: Config, index: int) -> Layer:
    """Attention is alike everywhere; the first layers are dense."""
    attention = GroupedQueryAttention.from_config(
        cfg, qkv_bias=cfg.attention_bias, qk_norm="head" if cfg.use_qk_norm else None
    )
    return Layer(attention, cfg.feed_forward(index))


FAMILY = Family(
    model_type="glm4_moe",
    config=Config,
    layer=layer,
    mtp=True,
    rename=SHARED_EXPERTS,
    unrename=SHARED_EXPERT_AS_PUBLISHED,
    gguf=(Gguf(architecture="glm4moe"),),
    dialect="key-value-tags",
    tiny={
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
)
