"""What a family is: a declaration of what is peculiar to it; the rest is alike for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from colibri.checkpoint.divide import Division
from colibri.models.config import BaseConfig
from colibri.models.gguf_names import Gguf
from colibri.nn.sublayer import Layer
from colibri.nn.trunk import Trunk


def plain_trunk(cfg: BaseConfig) -> Trunk:
    """Embedding, final norm and head without anything peculiar."""
    return Trunk(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        norm=cfg.norm,
        tied=cfg.tie_word_embeddings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        model_type: config.json's `model_type`; also the name of the family's file.
        config: the dataclass that reads config.json.
        layer: builds layer `index` of a config.
        trunk: builds what stands around the layers.
        aliases: other `model_type` values of the same computation.
        rename: (pattern, replacement) pairs from the checkpoint's tensor names to ours.
        spelling: how published checkpoints spell experts: `per-expert`, `w1w3w2` or `fused` (for
            writing, reading takes any).
        unrename: (ours, theirs) substrings that undo `rename` when a checkpoint is written as it
            would be published.
        divide: tensors (after renaming) that hold several of ours.
        ignore: patterns of tensors (after renaming) that are knowingly not used.
        mtp: whether checkpoints may hold heads that draft further tokens, made of layers as `layer`
            builds them behind the last.
        gguf: how GGUF files spell it, where they hold it; one for each architecture.
        dialect: syntax of reasoning and tool calls in this family's text.
        tiny: config values of the smallest model that shows everything peculiar to the family;
            tests run every family on it.
    """

    model_type: str
    config: type[BaseConfig]
    layer: Callable[[Any, int], Layer]
    trunk: Callable[[Any], Trunk] = plain_trunk
    aliases: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    spelling: str = "per-expert"
    unrename: tuple[tuple[str, str], ...] = ()
    divide: tuple[Division, ...] = ()
    ignore: tuple[str, ...] = ()
    mtp: bool = False
    gguf: tuple[Gguf, ...] = ()
    dialect: str | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def tiny_config(self, **changes: Any) -> dict[str, Any]:
        """A complete config.json for tests: common sizes, then `tiny`, then `changes`."""
        common = {
            "model_type": self.model_type,
            "architectures": ["ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "float32",
        }
        return {**common, **self.tiny, **changes}
