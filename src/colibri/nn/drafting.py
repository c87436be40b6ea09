"""Heads that draft further tokens: a layer of the model over its last state and the next token.

For the state h of a position and the token t after it, `block(eh_proj [enorm(embed(t)); hnorm(h)])`
foresees the token after t; its norm is the h of the next head (arXiv 2412.19437, section 2.2).
Embedding and output matrix are the model's own, whatever copies a checkpoint holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Kernels, Matrix, Norm
from colibri.kernels.recurrent_api import GroupNorm
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.sublayer import BoundSublayer, Demand, Layer, Step

# Names below the head's prefix; `block` means a layer's own.
_EMBED_NORM, _HIDDEN_NORM, _JOIN, _LAST_NORM = "enorm", "hnorm", "eh_proj", "shared_head.norm"
COPIES = (r"embed_tokens\.", r"shared_head\.head\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingHead:
    """The declaration of one head.

    Attributes:
        layer: its block.
    """

    hidden_size: int
    norm: RMSNorm
    layer: Layer

    @property
    def demand(self) -> Demand:
        """What the kernels need room for: the block, and rows of both inputs."""
        return Demand.largest([self.layer.demand, Demand(attention_width=2 * self.hidden_size)])

    def parameters(self, prefix: str) -> list[Parameter]:
        """Dense tensors under `prefix`, which ends with the head's dot."""
        hidden = self.hidden_size
        first = [self.norm.parameter(prefix + n, hidden) for n in (_EMBED_NORM, _HIDDEN_NORM)]
        first += linear(prefix + _JOIN, hidden, 2 * hidden)
        last = self.norm.parameter(prefix + _LAST_NORM, hidden)
        return [*first, *self.layer.parameters(prefix), last]

    def bind(
        self, weights: Weights, prefix: str, sublayers: tuple[BoundSublayer, ...]
    ) -> BoundDraftingHead:
        """Join it to its weights; `sublayers` are those of its block."""
        return BoundDraftingHead(
            embed_norm=self.norm.bind(weights, prefix + _EMBED_NORM),
            hidden_norm=self.norm.bind(weights, prefix + _HIDDEN_NORM),
            join=bind_linear(weights, prefix + _JOIN),
            sublayers=sublayers,
            norm=self.norm.bind(weights, prefix + _LAST_NORM),
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundDraftingHead:
    """One head, ready to compute.

    Attributes:
        norm: before the output matrix, and before the next head.
    """

    embed_norm: Norm
    hidden_norm: Norm
    join: Matrix
    sublayers: tuple[BoundSublayer, ...]
    norm: Norm

    def step(self, step: Step, embedded: Floats, hidden: Floats) -> Floats:
        """The stream `[T, D]` behind the block.

        `embedded [T, D]` are the tokens that follow the rows, `hidden [T, D]` the normed states.
        """
        kernels = step.kernels
        both = [normed(kernels, self.embed_norm, embedded)]
        both.append(normed(kernels, self.hidden_norm, hidden))
        x = kernels.matmul(self.join, np.concatenate(both, axis=1))
        for sublayer in self.sublayers:
            sublayer.step(step, x, x)
        return x


def normed(kernels: Kernels, norm: Norm | None, x: Floats) -> Floats:
    """The norm of rows `x [T, D]`, where there is one."""
    if norm is None:
        return x
    return kernels.norm_rows(GroupNorm(x.shape[1], norm.eps, norm.weight), x)
