"""Inkling, its text part: biases of distances, short convolutions, weighed shared experts."""

from __future__ import annotations

from colibri.checkpoint.divide import Division
from colibri.models.family import Family
from colibri.models.inkling import DENSE, SLIDING, InklingConfig
from colibri.nn.convolved import Convolved
from colibri.nn.sublayer import Layer
from colibri.nn.trunk import Trunk


def layer(cfg: InklingConfig, index: int) -> Layer:
    """What attention and feed-forward find is convolved before it is added."""
    width, kernel = cfg.hidden_size, cfg.conv_kernel_size
    return Layer(
        Convolved(cfg.attention(index), "attn_sconv", width, kernel),
        Convolved(cfg.feed_forward(index), "mlp_sconv", width, kernel),
    )


def trunk(cfg: InklingConfig) -> Trunk:
    """Embeddings are normed and never tied; logits are scaled for the width (muP)."""
    return Trunk(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        norm=cfg.norm,
        tied=False,  # whatever the config says: both matrices are published
        embedding_norm=True,
        divisor=cfg.logits_mup_width_multiplier,
        num_logits=cfg.num_ids,
    )


FAMILY = Family(
    model_type="inkling_text",
    aliases=("inkling_mm_model",),
    config=InklingConfig,
    layer=layer,
    trunk=trunk,
    rename=(
        (r"^model\.(llm|language_model)\.", "model."),
        (r"^model\.unembed\.", "lm_head."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^model\.embed_norm\.", "model.embed_tokens.embed_norm."),
        (r"\.attn\.w([qkvro])_[a-z]{2}\.", r".self_attn.\1_proj."),
        (r"\.attn\.([kv]_sconv)\.weight$", r".self_attn.\1.conv1d.weight"),
        (r"\.attn\.([qk]_norm|rel_logits_proj)\.", r".self_attn.\1."),
        (r"\.(attn|mlp)_sconv\.weight$", r".\1_sconv.conv1d.weight"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.shared_w2_weight$", ".down_proj"),
        (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
    ),
    spelling="fused",
    divide=(
        Division(".w13_dn.weight", (".gate_proj.weight", ".up_proj.weight")),
        Division(".shared_w13_weight", (".gate_proj", ".up_proj")),
        *(
            Division(f".shared_experts.{part}_proj", (f".shared_experts.{{}}.{part}_proj.weight",))
            for part in ("gate", "up", "down")
        ),
    ),
    ignore=(*(rf"model\.{part}\." for part in ("audio", "audio_tower", "visual", "vision_tower")),),
    tiny={
        "head_dim": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 24,
        "sliding_window_size": 8,
        "d_rel": 8,
        "rel_extent": 16,
        "log_scaling_n_floor": 8,
        "logits_mup_width_multiplier": 4.0,
        "vocab_size": 528,
        "unpadded_vocab_size": 512,
        "layer_types": [SLIDING, "hybrid", SLIDING],
        "mlp_layer_types": [DENSE, "sparse", "sparse"],
    },
)
