"""A family's declaration applied to one config.json, before any weight file is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri.checkpoint.config import normalize
from colibri.checkpoint.experts import ExpertLayer
from colibri.kernels.api import Limits
from colibri.models.config import BaseConfig
from colibri.models.family import Family, Layer
from colibri.models.registry import family_of
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.parameter import Parameter

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_prefix(index: int) -> str:
    """Where the tensors of layer `index` are named."""
    return f"model.layers.{index}."


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model of this config is made of."""

    family: Family
    config: BaseConfig
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, raw_config: Mapping[str, Any]) -> Blueprint:
        """Read config.json's contents by the family that it names.

        Raises:
            ConfigError, UnsupportedModelError: as the family's config raises them.
        """
        normal = normalize(raw_config)
        family = family_of(normal)
        config = family.config.read(normal)
        return cls(
            family, config, tuple(family.layer(config, i) for i in range(config.num_hidden_layers))
        )

    def parameters(self) -> list[Parameter]:
        """Every dense tensor, in the order of the forward pass."""
        cfg = self.config
        found = [Parameter(EMBEDDING, (cfg.vocab_size, cfg.hidden_size), "embedding")]
        for index, layer in enumerate(self.layers):
            found += layer.attention.parameters(layer_prefix(index))
            found += layer.ffn.parameters(layer_prefix(index))
        found.append(Parameter(FINAL_NORM, (cfg.hidden_size,), "norm"))
        if not cfg.tie_word_embeddings:
            found.append(Parameter(LM_HEAD, (cfg.vocab_size, cfg.hidden_size), "matrix"))
        return found

    def moe_layers(self) -> list[tuple[int, MoEFFN]]:
        """The sparse layers with their numbers."""
        return [
            (i, layer.ffn) for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoEFFN)
        ]

    def expert_layers(self) -> list[ExpertLayer]:
        """What the checkpoint must hold of routed experts."""
        return [moe.expert_layer(i, layer_prefix(i)) for i, moe in self.moe_layers()]

    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that are knowingly not used; a tied model's own lm_head is one."""
        return (
            (*self.family.ignore, r"lm_head\.weight")
            if self.config.tie_word_embeddings
            else self.family.ignore
        )

    def limits(self, rows: int) -> Limits:
        """The largest step of `rows` rows."""
        cfg, widths = self.config, [1]
        experts = active = 1
        for layer in self.layers:
            ffn = layer.ffn
            widths.append(ffn.intermediate_size)
            if not isinstance(ffn, DenseFFN):
                widths.append(ffn.shared_intermediate_size or 1)
                experts, active = (
                    max(experts, ffn.num_experts),
                    max(active, ffn.num_experts_per_tok),
                )
        attention = max(layer.attention.width for layer in self.layers)
        return Limits(
            rows, cfg.hidden_size, attention, max(widths), experts, active, cfg.vocab_size
        )
