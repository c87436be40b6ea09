"""A sublayer whose result passes a short convolution before it is added to the stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from colibri.checkpoint.experts import ExpertLayer
from colibri.formats import Floats
from colibri.kernels.api import CellLayer, Ints, Kernels
from colibri.kernels.recurrent_api import ShortConv, conv_state_nbytes
from colibri.kv import StateShape
from colibri.nn.cell import shares, shares_nbytes
from colibri.nn.parameter import Parameter
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


@dataclass(frozen=True, slots=True)
class Convolved(Sublayer):
    """`x += z + conv(z)` with `z = inner(x)`.

    Attributes:
        name: of the convolution's tensor, without `.conv1d.weight`.
        kernel: its taps.
    """

    inner: Sublayer
    name: str
    hidden_size: int
    kernel: int

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the inner sublayer's cell, then of the convolution's inputs."""
        return [self.inner.state.cell_nbytes, conv_state_nbytes(self.hidden_size, self.kernel)]

    @property
    def state(self) -> StateShape:
        """What the inner sublayer keeps, and the convolution's inputs."""
        return replace(self.inner.state, cell_nbytes=shares_nbytes(self.state_sizes))

    @property
    def demand(self) -> Demand:
        """The inner sublayer's, and room for its result."""
        demand = self.inner.demand
        return replace(demand, array_width=demand.array_width + self.hidden_size)

    def parameters(self, prefix: str) -> list[Parameter]:
        """The inner sublayer's, then the filter."""
        shape = (self.hidden_size, 1, self.kernel)
        name = f"{prefix}{self.name}.conv1d.weight"
        return [*self.inner.parameters(prefix), Parameter(name, shape, "filter")]

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer | None:
        """The inner sublayer's."""
        return self.inner.expert_layer(layer, prefix)

    def bind(self, site: Site) -> BoundConvolved:
        """Bind both, each to its share of the cells."""
        own, kept = shares(site.state.cells, self.state_sizes)
        state = replace(site.state, cells=own if own.nbytes else None)
        weight = site.weights.vector(f"{site.prefix}{self.name}.conv1d.weight")
        conv = ShortConv(weight.reshape(self.hidden_size, self.kernel), residual=True)
        return BoundConvolved(self.inner.bind(replace(site, state=state)), conv, kept)


@dataclass(frozen=True, slots=True, eq=False)
class BoundConvolved(BoundSublayer):
    """A sublayer with its convolution, ready to compute."""

    inner: BoundSublayer
    conv: ShortConv
    kept: CellLayer

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        out = np.zeros_like(x)
        self.inner.step(step, x, out)
        step.kernels.short_conv(self.conv, out, step.batch, self.kept)
        y += out

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        """The inner sublayer's."""
        return self.inner.foresee(kernels, x, ids)

    def innermost(self) -> BoundSublayer:
        """The inner sublayer's."""
        return self.inner.innermost()

    def reading(self, kernels: Kernels, x: Floats) -> Floats:
        """The inner sublayer's."""
        return self.inner.reading(kernels, x)
