"""A family's declaration applied to one config.json, before any weight file is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from colibri.checkpoint.config import normalize
from colibri.checkpoint.experts import ExpertLayer
from colibri.kernels.api import Limits
from colibri.kv import StateShape
from colibri.models.config import BaseConfig
from colibri.models.family import Family
from colibri.models.registry import family_of
from colibri.nn.parameter import Parameter
from colibri.nn.sublayer import Demand, Layer
from colibri.nn.trunk import LM_HEAD, Trunk

_DRAFTING, _MOST_DRAFTING = (r"mtp\.", r"model\.mtp"), 16


def layer_prefix(index: int) -> str:
    """Where the tensors of layer `index` are named."""
    return f"model.layers.{index}."


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model of this config is made of."""

    family: Family
    config: BaseConfig
    layers: tuple[Layer, ...]
    trunk: Trunk

    @classmethod
    def of(cls, raw_config: Mapping[str, Any]) -> Blueprint:
        """Read config.json's contents by the family that it names.

        Raises:
            ConfigError, UnsupportedModelError: as the family's config raises them.
        """
        normal = normalize(raw_config)
        family = family_of(normal)
        config = family.config.read(normal)
        layers = tuple(family.layer(config, i) for i in range(config.num_hidden_layers))
        return cls(family, config, layers, family.trunk(config))

    def parameters(self) -> list[Parameter]:
        """Every dense tensor, in the order of the forward pass."""
        found = self.trunk.first_parameters()
        for index, layer in enumerate(self.layers):
            found += layer.parameters(layer_prefix(index))
        return [*found, *self.trunk.last_parameters()]

    def expert_layers(self) -> list[ExpertLayer]:
        """What the checkpoint must hold of routed experts."""
        found = (
            layer.expert_layer(index, layer_prefix(index))
            for index, layer in enumerate(self.layers)
        )
        return [experts for experts in found if experts is not None]

    def sparse_layers(self) -> list[tuple[int, Demand]]:
        """The layers with routed experts, and what these ask for."""
        found = [(index, layer.demand) for index, layer in enumerate(self.layers)]
        return [(index, demand) for index, demand in found if demand.num_experts]

    def states(self) -> list[StateShape]:
        """What each sublayer keeps of a sequence, in the order of the forward pass."""
        return [each.state for layer in self.layers for each in layer.sublayers]

    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that are knowingly not used.

        A tied model's own lm_head is one; so are heads that draft further tokens, which stand
        behind the last layer or under `mtp`.
        """
        ignored = (*self.family.ignore, *_DRAFTING)
        drafting = range(len(self.layers), len(self.layers) + _MOST_DRAFTING)
        ignored += (rf"model\.layers\.({'|'.join(map(str, drafting))})\.",)
        return (*ignored, re.escape(LM_HEAD)) if self.trunk.tied else ignored

    @property
    def demand(self) -> Demand:
        """The largest operands of any layer."""
        return Demand.largest(layer.demand for layer in self.layers)

    def limits(self, rows: int) -> Limits:
        """The largest step of `rows` rows."""
        demand = self.demand
        return Limits(
            rows=rows,
            hidden_size=self.config.hidden_size,
            attention_width=demand.attention_width,
            intermediate_size=max(1, demand.intermediate_size),
            num_experts=max(1, demand.num_experts),
            num_experts_per_tok=max(1, demand.num_experts_per_tok),
            vocab_size=self.config.vocab_size,
            latent=replace(demand.latent, index_positions=self.config.max_position_embeddings)
            if demand.latent.index_heads
            else demand.latent,
        )
