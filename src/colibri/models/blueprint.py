"""A family's declaration applied to one config.json, before any weight file is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from colibri.checkpoint.config import normalize
from colibri.checkpoint.experts import ExpertLayer
from colibri.errors import UnsupportedModelError
from colibri.kernels.api import KV_BLOCK, Limits
from colibri.kv import StateShape
from colibri.models.config import BaseConfig
from colibri.models.family import Family
from colibri.models.registry import family_of
from colibri.nn.drafting import COPIES, DraftingHead
from colibri.nn.parameter import Parameter
from colibri.nn.sublayer import Demand, Layer
from colibri.nn.trunk import LM_HEAD, Trunk

HEAD_STEM = "mtp.layers."  # of all tensors of drafting heads, as we name them
_DRAFTING, _MOST_DRAFTING = (r"mtp\.", r"model\.mtp"), 16
# Where one head stands alone, its own tensors are one level up.
_SINGLE_HEAD = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def layer_prefix(index: int) -> str:
    """Where the tensors of layer `index` are named."""
    return f"model.layers.{index}."


def head_prefix(number: int) -> str:
    """Where the tensors of a drafting head are named."""
    return f"{HEAD_STEM}{number}."


class Place(NamedTuple):
    """A layer in its model: its number, where its tensors are named, and what it is."""

    number: int
    prefix: str
    layer: Layer


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model of this config is made of.

    Attributes:
        heads: that draft further tokens, as far as they are asked for.
    """

    family: Family
    config: BaseConfig
    layers: tuple[Layer, ...]
    trunk: Trunk
    heads: tuple[DraftingHead, ...] = ()

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

    def with_heads(self, count: int) -> Blueprint:
        """The same with `count` drafting heads, whose layers follow the last.

        Raises:
            UnsupportedModelError: this family has none that are known.
        """
        if not self.family.mtp:
            raise UnsupportedModelError(
                f"drafting heads of {self.family.model_type} are not implemented: leave `mtp` out"
            )
        cfg, number = self.config, len(self.layers)
        layers = [self.family.layer(cfg, number + i) for i in range(count)]
        heads = (
            DraftingHead(hidden_size=cfg.hidden_size, norm=cfg.norm, layer=layer)
            for layer in layers
        )
        return replace(self, heads=tuple(heads))

    @property
    def head_rename(self) -> tuple[tuple[str, str], ...]:
        """Rules that name all tensors of drafting heads under `head_prefix`."""
        number = len(self.layers)
        behind = (
            (rf"^model\.layers\.{number + i}\.", head_prefix(i)) for i in range(_MOST_DRAFTING)
        )
        single = (
            (rf"^mtp\.{re.escape(theirs)}\.", f"{head_prefix(0)}{ours}.")
            for theirs, ours in _SINGLE_HEAD.items()
        )
        return (*behind, *single)

    @property
    def places(self) -> list[Place]:
        """Every layer, those of drafting heads behind the others."""
        layers = [Place(i, layer_prefix(i), layer) for i, layer in enumerate(self.layers)]
        heads = enumerate(self.heads)
        return layers + [Place(len(layers) + i, head_prefix(i), x.layer) for i, x in heads]

    def parameters(self) -> list[Parameter]:
        """Every dense tensor, in the order of the forward pass."""
        found = self.trunk.first_parameters()
        for index, layer in enumerate(self.layers):
            found += layer.parameters(layer_prefix(index))
        found += self.trunk.last_parameters()
        for number, head in enumerate(self.heads):
            found += head.parameters(head_prefix(number))
        return found

    def expert_layers(self) -> list[ExpertLayer]:
        """What the checkpoint must hold of routed experts."""
        found = (layer.expert_layer(index, prefix) for index, prefix, layer in self.places)
        return [experts for experts in found if experts is not None]

    def sparse_layers(self) -> list[tuple[int, Demand]]:
        """The layers with routed experts, and what these ask for."""
        found = [(index, layer.demand) for index, layer in enumerate(self.layers)]
        return [(index, demand) for index, demand in found if demand.num_experts]

    def states(self, positions: int) -> list[StateShape]:
        """What each sublayer keeps of at most so many positions, in the order of the forward pass.

        See `StateShape.within`.
        """
        sublayers = [each for place in self.places for each in place.layer.sublayers]
        return [each.state.within(positions) for each in sublayers]

    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that are knowingly not used.

        A tied model's own lm_head is one; so are heads that draft further tokens, which stand
        behind the last layer or under `mtp`, unless they are asked for: then only their copies of
        embedding and output matrix are.
        """
        if self.heads:
            copies = tuple(rf"mtp\.layers\.\d+\.{copy}" for copy in COPIES)
            return (*self.family.ignore, *copies, *self._tied_head)
        ignored = (*self.family.ignore, *_DRAFTING)
        drafting = range(len(self.layers), len(self.layers) + _MOST_DRAFTING)
        ignored += (rf"model\.layers\.({'|'.join(map(str, drafting))})\.",)
        return (*ignored, *self._tied_head)

    @property
    def _tied_head(self) -> tuple[str, ...]:
        return (re.escape(LM_HEAD),) if self.trunk.tied else ()

    def array_floats(self, rows: int) -> int:
        """Floats that the arrays of any one sublayer take in a step of so many rows."""
        demands = [each.demand for place in self.places for each in place.layer.sublayers]
        demands += [head.demand for head in self.heads]
        return max(demand.array_floats(rows) for demand in demands)

    @property
    def demand(self) -> Demand:
        """The largest operands of any layer."""
        layers = [layer.demand for layer in self.layers]
        return Demand.largest([*layers, *(head.demand for head in self.heads)])

    def limits(self, rows: int) -> Limits:
        """The largest step of `rows` rows."""
        demand = self.demand
        blocks = -(-self.config.max_position_embeddings // KV_BLOCK)
        return Limits(
            rows=rows,
            hidden_size=self.config.hidden_size,
            attention_width=demand.attention_width,
            intermediate_size=max(1, demand.intermediate_size),
            num_experts=max(1, demand.num_experts),
            num_experts_per_tok=max(1, demand.num_experts_per_tok),
            vocab_size=self.config.vocab_size,
            latent=replace(demand.latent, index_positions=blocks * demand.latent.index_per_block),
        )
