"""Qwen3.8-Flash-Next, its text part: gated streams, attention to blocks, n-grams read from disk."""

from __future__ import annotations

from colibri.models.family import Family
from colibri.models.streamed import StreamedConfig
from colibri.nn.hyper import HyperTrunk, hyper_connected
from colibri.nn.sublayer import Layer

_MIXES = ("attn_hyper_connection", "mlp_hyper_connection")


def layer(cfg: StreamedConfig, index: int) -> Layer:
    """Some layers begin with an n-gram embedding, which reads and writes the streams themselves."""
    both = hyper_connected(Layer(cfg.attention(index), cfg.experts()), cfg.streams, _MIXES)
    embedding = cfg.embedding(index)
    return both if embedding is None else Layer(embedding, *both.sublayers)


def trunk(cfg: StreamedConfig) -> HyperTrunk:
    """What the head reads is normed already."""
    return HyperTrunk(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        norm=cfg.norm,
        tied=cfg.tie_word_embeddings,
        final_norm=False,
        streams=cfg.streams,
        head="weighed",
    )


FAMILY = Family(
    model_type="qwen4_exp",
    aliases=("qwen4_exp_text",),
    config=StreamedConfig,
    layer=layer,
    trunk=trunk,
    rename=((r"^model\.language_model\.", "model."),),
    spelling="fused",
    ignore=(
        r"model\.visual\.",
        # Computed from config.json, which says the same.
        r"model\.layers\.\d+\.ple\.ple_embedding\.layer_multipliers$",
        r"model\.layers\.\d+\.ple\.ple_embedding\.ngram_heads_\w+$",
    ),
    dialect="function-tags",
    tiny={
        "model_type": "qwen4_exp_text",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "hc_count": 4,
        "hc_lowrank": 16,
        "indexer_n_heads": 12,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 48,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4,
    },
)
