"""How a family is spelled in GGUF files: its architecture, what names and keys become.

Names and keys are those of ggml's `gguf` package. What architectures have in common is here;
`Gguf` in a family's file says what is peculiar to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri.checkpoint.rename import Renaming

TOKENIZER = "tokenizer."
ROPE_FREQUENCIES = "rope_freqs.weight"
# Keys below the architecture's name, and the config keys that they are.
COMMON_KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.clamp_kqv": "clip_qkv",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
# Keys that say nothing which tensors and other keys do not, or are read elsewhere.
SILENT_KEYS = frozenset(
    {
        "vocab_size",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "expert_gating_func",
    }
)
# Of families whose `intermediate_size` is the width of an expert, and whose scores are their own.
EXPERT_WIDTHS = {"expert_feed_forward_length": "intermediate_size", "expert_gating_func": ""}
_PARTS = r"(gate|up|down)"
_COMMON_NAMES = (
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.(ffn_norm|post_attention_norm)\.", ".post_attention_layernorm."),
    (r"\.attn_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.attn_([qk])_norm\.", r".self_attn.\1_norm."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.attn_sinks\.weight", ".self_attn.sinks"),
    (r"\.attn_([qk]v?)_a_norm\.", r".self_attn.\1_a_layernorm."),
    (r"\.attn_kv_a_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.attn_(q_a|q_b|kv_b|k_b|v_b)\.", r".self_attn.\1_proj."),
    (r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."),
    (r"\.ffn_gate_inp\.", ".mlp.gate."),
    (r"\.exp_probs_b(\.bias)?$", ".mlp.gate.e_score_correction_bias"),
    (rf"\.ffn_{_PARTS}_exps\.weight", r".mlp.experts.\1_proj.weight"),
    (rf"\.ffn_{_PARTS}_exps\.bias", r".mlp.experts.\1_proj_bias"),
    (rf"\.ffn_{_PARTS}_shexp\.", r".mlp.shared_expert.\1_proj."),
    (rf"\.ffn_{_PARTS}\.(\d+)\.", r".mlp.experts.\2.\1_proj."),
    (rf"\.ffn_{_PARTS}\.", r".mlp.\1_proj."),
    (r"\.nextn\.shared_head_(head|norm)\.", r".shared_head.\1."),
    (r"\.nextn\.", "."),
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one architecture.

    Attributes:
        architecture: what they begin with.
        values: by the rest of their names.
    """

    architecture: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, architecture: str, metadata: Mapping[str, Any]) -> Keys:
        """Those of a file's metadata."""
        start = f"{architecture}."
        own = {k.removeprefix(start): v for k, v in metadata.items() if k.startswith(start)}
        return cls(architecture, own)

    def get(self, key: str) -> Any:
        """The value; None where it is not given."""
        return self.values.get(key)


def _any(keys: Keys) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """What GGUF files of a family's architecture say in their own way.

    Attributes:
        architecture: `general.architecture`.
        when: whether a file of that architecture is of this family, where several share it.
        keys: (key, config key) pairs beside or instead of the common ones; "" leaves a key out.
        config: values of config keys that the architecture implies.
        adapt: further config values that follow from several keys; takes them and the config.
        yarn: what it implies of rope scaled by YaRN.
        rename: (pattern, replacement) pairs that come before the common ones.
        pairs: whether rows of q and k are permuted so that rope turns neighbours.
    """

    architecture: str
    when: Callable[[Keys], bool] = _any
    keys: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[Keys, Mapping[str, Any]], Mapping[str, Any]] | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
    rename: Sequence[tuple[str, str]] = ()
    pairs: bool = False

    @property
    def renaming(self) -> Renaming:
        """From names in the file to ours."""
        return Renaming((*self.rename, *_COMMON_NAMES))

    @property
    def config_keys(self) -> dict[str, str]:
        """Every key that is a config key, and which."""
        return {key: name for key, name in {**COMMON_KEYS, **self.keys}.items() if name}


def has_experts(keys: Keys) -> bool:
    """Whether a file says that it has routed experts."""
    return bool(keys.get("expert_count"))


def is_dense(keys: Keys) -> bool:
    """Whether it says nothing of them."""
    return not has_experts(keys)
