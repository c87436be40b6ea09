"""Kimi-Linear: Kimi delta attention, every fourth layer latent attention without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from colibri.models.family import Family
from colibri.models.kimi_delta import KimiDeltaConfig
from colibri.models.latent import LatentMoEConfig
from colibri.models.noaux import SHARED_EXPERTS
from colibri.nn.mla import MultiHeadLatentAttention
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(KimiDeltaConfig, LatentMoEConfig):
    """Order is known from the recurrence alone."""

    mla_use_nope: bool = True
    use_grouped_topk: bool = True

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """`model_max_length` is what others call `max_position_embeddings`."""
        longest = {"max_position_embeddings": config.get("model_max_length")}
        rest = {key: value for key, value in config.items() if key != "model_max_length"}
        return super().read({**longest, **rest})

    def check(self) -> None:
        """Nothing asks for positions, nor groups for what is not done."""
        super().check()
        self.require(self.mla_use_nope, "mla_use_nope", "must be true")
        still = self.rope.attention_factor == 1
        self.require(still, "rope_parameters", "scale positions, which the model does not know")
        plain = self.use_grouped_topk or self.n_group == 1
        self.require(plain, "use_grouped_topk", "must be true where there are groups")


def layer(cfg: Config, index: int) -> Layer:
    """Both kinds of attention stand before the same feed-forwards."""
    if cfg.is_linear(index):
        return Layer(cfg.delta_attention((1, 1, cfg.linear_num_heads, 1)), cfg.feed_forward(index))
    return Layer(MultiHeadLatentAttention.from_config(cfg, None), cfg.feed_forward(index))


FAMILY = Family(
    model_type="kimi_linear",
    config=Config,
    layer=layer,
    rename=((r"\.block_sparse_moe\.", ".mlp."), *SHARED_EXPERTS),
    unrename=(
        (".mlp.shared_expert.", ".block_sparse_moe.shared_experts."),
        (".mlp.gate.", ".block_sparse_moe.gate."),
        (".mlp.experts.", ".block_sparse_moe.experts."),
    ),
    spelling="w1w3w2",
    dialect="pipe-sections",
    tiny={
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "pad_token_id": None,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
)
