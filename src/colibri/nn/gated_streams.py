"""Residual streams that gates read, channel by channel, and that a weight for each writes.

Qwen3.8-Flash-Next's form of hyper-connections: streams are normed, the gates of all their channels
come from a low-rank projection of them, and what a sublayer finds is added to each stream times a
weight between 0 and 2; streams are not mixed among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Kernels, Matrix
from colibri.kernels.recurrent_api import GroupNorm, Projections
from colibri.nn.hyper import Mixing, StreamForm
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.sublayer import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreams(StreamForm):
    """How wide the low rank is, and how streams are normed.

    Attributes:
        rank: of the gates.
        norm: of each stream, with weights of its own.
    """

    rank: int
    norm: RMSNorm

    @property
    def demand(self) -> Demand:
        """The widest product; normed streams, gates, what is read and what is added as arrays."""
        arrays = 2 * self.width + 2 * self.hidden_size + 3 * self.rank + 2 * self.count
        return Demand(attention_width=max(self.width, self.rank), array_width=arrays)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Of reading, and the weights of writing."""
        name = f"{prefix}block_inject_weight"
        return [*self._reading(prefix), *linear(name, self.count, self.width)]

    def head_parameters(self) -> list[Parameter]:
        """Of reading."""
        return self._reading(self.head)

    def _reading(self, prefix: str) -> list[Parameter]:
        return [
            self.norm.parameter(f"{prefix}hc_norm", self.width),
            *linear(f"{prefix}input_mix_weight_down", self.rank, self.width),
            *linear(f"{prefix}input_mix_weight_up", self.width, self.rank),
        ]

    def bind(self, weights: Weights, prefix: str, *, reads_only: bool = False) -> GatedMixing:
        """Join what is under `prefix` to its weights."""
        norm = self.norm.bind(weights, f"{prefix}hc_norm")
        names = ["input_mix_weight_down", *([] if reads_only else ["block_inject_weight"])]
        return GatedMixing(
            self.count,
            GroupNorm(self.hidden_size, norm.eps, norm.weight),
            Projections(tuple(bind_linear(weights, prefix + name) for name in names)),
            bind_linear(weights, f"{prefix}input_mix_weight_up"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GatedMixing(Mixing):
    """Streams between gates, ready to compute.

    Attributes:
        down: the low rank, then where it writes the weights of writing.
        up: the gates.
    """

    num_streams: int
    norm: GroupNorm
    down: Projections
    up: Matrix

    def read(self, kernels: Kernels, x: Floats) -> tuple[Floats, Floats]:
        """With `h = norm(x)`: `mean_i sigmoid(up silu(down h / n))_i h_i`, and how it is written.

        The weights of writing are `2 sigmoid(inject h / n)`.
        """
        share = np.float32(1 / self.num_streams)
        normed = kernels.norm_rows(self.norm, x)
        low, *inject = kernels.project(self.down, normed)
        gates = kernels.matmul(self.up, kernels.activate("silu", low * share))
        found = kernels.read_gated(normed, gates, self.num_streams)
        if not inject:
            return found, np.empty((len(x), 0), np.float32)
        return found, np.float32(2) * kernels.activate("sigmoid", inject[0] * share)

    def write(self, kernels: Kernels, weights: Floats, y: Floats, x: Floats) -> None:
        """`x_i += weights_i y`."""
        kernels.write_gated(weights, y, x)
