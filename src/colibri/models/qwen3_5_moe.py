"""Qwen3.5 and 3.6 with experts, their text part: Qwen3-Next stored part by part, all sparse."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import MoEConfig
from colibri.models.family import Family
from colibri.models.hybrid import HybridConfig
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig, MoEConfig):
    """Every layer is sparse and has a shared expert; the state is float32 in any case."""

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    attn_output_gate: bool = True
    mamba_ssm_dtype: str = "float32"
    mtp_num_hidden_layers: int = 0

    def check(self) -> None:
        """Attention without gates is another model."""
        super().check()
        self.require(self.attn_output_gate, "attn_output_gate", "must be true")


def layer(cfg: Config, index: int) -> Layer:
    """The weights of chosen experts always add up to one."""
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=True),
        intermediate_size=cfg.moe_intermediate_size,
        shared_intermediate_size=cfg.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return Layer(cfg.mixer(index, interleaved=False), moe)


FAMILY = Family(
    model_type="qwen3_5_moe",
    aliases=("qwen3_5_moe_text",),
    config=Config,
    layer=layer,
    mtp=True,
    rename=((r"^model\.language_model\.", "model."),),
    spelling="fused",
    ignore=(r"model\.visual\.",),
    dialect="function-tags",
    tiny={
        "model_type": "qwen3_5_moe_text",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
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
