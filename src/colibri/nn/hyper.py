"""Hyper-connections: several residual streams, read and written by each sublayer with own weights.

A sublayer stays what it is: wrapped in `HyperConnected` it reads one sum of the streams and adds
to all of them. `HyperTrunk` makes streams of an embedding and one row of the streams at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from colibri.checkpoint.experts import ExpertLayer
from colibri.formats import Floats
from colibri.kernels.api import Ints, Kernels
from colibri.kernels.streams import StreamMix, stream_weights
from colibri.kv import StateShape
from colibri.nn.parameter import Parameter, Weights
from colibri.nn.sublayer import BoundSublayer, Demand, Layer, Site, Step, Sublayer
from colibri.nn.trunk import BoundTrunk, Trunk

_HEAD = "model.hc_head.hc_"


class HyperConfig(Protocol):
    """The config keys that hyper-connections read."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def hc_mult(self) -> int:
        """Streams."""

    @property
    def hc_sinkhorn_iters(self) -> int:
        """How often rows and columns of the mixing matrix are normalised."""

    @property
    def hc_eps(self) -> float:
        """Added to weights and to what they are divided by."""

    @property
    def rms_norm_eps(self) -> float:
        """Of the norm of all streams together."""


class Mixing(ABC):
    """How streams are read and written at one place, ready to compute."""

    __slots__ = ()

    @abstractmethod
    def read(self, kernels: Kernels, x: Floats) -> tuple[Floats, Floats]:
        """What a sublayer reads of `x [T, n D]`, `[T, D]`, and the weights of writing."""

    @abstractmethod
    def write(self, kernels: Kernels, weights: Floats, y: Floats, x: Floats) -> None:
        """Write `y [T, D]` into `x`, by the weights of the reading before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm(ABC):
    """How many streams there are; subclasses say how they are read and written.

    Attributes:
        head: prefix of the tensors by which the head reads.
    """

    count: int
    hidden_size: int
    head: str = _HEAD

    @property
    def width(self) -> int:
        """Columns of all streams together."""
        return self.count * self.hidden_size

    @property
    @abstractmethod
    def demand(self) -> Demand:
        """What reading and writing need room for, beside the streams."""

    @abstractmethod
    def parameters(self, prefix: str) -> list[Parameter]:
        """What a sublayer is read and written by, under `prefix`."""

    @abstractmethod
    def head_parameters(self) -> list[Parameter]:
        """What the head reads by."""

    @abstractmethod
    def bind(self, weights: Weights, prefix: str, *, reads_only: bool = False) -> Mixing:
        """Join what is under `prefix` to its weights; a head only reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams(StreamForm):
    """Streams that a doubly stochastic matrix mixes; see `kernels.streams.StreamMix`."""

    iterations: int
    eps: float
    norm_eps: float

    @classmethod
    def from_config(cls, cfg: HyperConfig) -> Streams:
        """By the keys of the config."""
        return cls(
            count=cfg.hc_mult,
            hidden_size=cfg.hidden_size,
            iterations=cfg.hc_sinkhorn_iters,
            eps=cfg.hc_eps,
            norm_eps=cfg.rms_norm_eps,
        )

    @property
    def demand(self) -> Demand:
        """Arrays of what is read, added and weighed."""
        weights = stream_weights(self.count)
        return Demand(array_width=self.width + 2 * self.hidden_size + weights)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Of reading, of writing, and of the matrix."""
        return self._parameters(prefix, stream_weights(self.count), 3)

    def head_parameters(self) -> list[Parameter]:
        """Of reading."""
        return self._parameters(self.head, self.count, 1)

    def _parameters(self, prefix: str, rows: int, num_scales: int) -> list[Parameter]:
        """Of a mix with `rows` weights, `num_scales` of which are scaled alike."""
        return [
            Parameter(f"{prefix}fn", (rows, self.width), "router"),
            Parameter(f"{prefix}base", (rows,), "bias"),
            Parameter(f"{prefix}scale", (num_scales,), "bias"),
        ]

    def bind(self, weights: Weights, prefix: str, *, reads_only: bool = False) -> Mixing:
        """The kernels' view of the mix under `prefix`; its rows say whether it only reads."""
        mix = StreamMix(
            fn=weights.matrix(f"{prefix}fn"),
            base=weights.vector(f"{prefix}base"),
            scale=weights.vector(f"{prefix}scale"),
            num_streams=self.count,
            norm_eps=self.norm_eps,
            eps=self.eps,
            iterations=self.iterations,
        )
        return StochasticMixing(mix)


@dataclass(frozen=True, slots=True, eq=False)
class StochasticMixing(Mixing):
    """Weighed sums, and streams that are mixed among themselves."""

    mix: StreamMix

    def read(self, kernels: Kernels, x: Floats) -> tuple[Floats, Floats]:
        """See `Mixing.read`."""
        return kernels.read_streams(self.mix, x)

    def write(self, kernels: Kernels, weights: Floats, y: Floats, x: Floats) -> None:
        """See `Mixing.write`."""
        kernels.write_streams(self.mix, weights, y, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnected(Sublayer):
    """A sublayer between streams.

    Attributes:
        inner: the sublayer.
        name: of the mix among the layer's tensors.
    """

    inner: Sublayer
    streams: StreamForm
    name: str

    @property
    def state(self) -> StateShape:
        """The sublayer's."""
        return self.inner.state

    @property
    def demand(self) -> Demand:
        """The sublayer's; and what reading and writing need, beside the streams."""
        inner, own = self.inner.demand, self.streams.demand
        both = Demand.largest([inner, own])
        return replace(both, array_width=inner.array_width + own.array_width)

    def parameters(self, prefix: str) -> list[Parameter]:
        """The sublayer's and the mix."""
        own = self.streams.parameters(f"{prefix}{self.name}.")
        return [*self.inner.parameters(prefix), *own]

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer | None:
        """The sublayer's."""
        return self.inner.expert_layer(layer, prefix)

    def bind(self, site: Site) -> BoundHyperConnected:
        """Join both to their weights."""
        mix = self.streams.bind(site.weights, f"{site.prefix}{self.name}.")
        return BoundHyperConnected(self.inner.bind(site), mix)


def hyper_connected(
    layer: Layer, streams: StreamForm, names: tuple[str, str] = ("attn_hc", "ffn_hc")
) -> Layer:
    """A layer of attention and feed-forward between streams."""
    both = zip(layer.sublayers, names, strict=True)
    return Layer(*(HyperConnected(inner=each, streams=streams, name=name) for each, name in both))


@dataclass(frozen=True, slots=True, eq=False)
class BoundHyperConnected(BoundSublayer):
    """A sublayer between streams, ready to compute."""

    inner: BoundSublayer
    mix: Mixing

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """Read, compute, write into `x [T, n D]`; nothing else may be written to, so `y` is `x`."""
        if y is not x:
            raise ValueError("streams are mixed in place")
        hidden, weights = self.mix.read(step.kernels, x)
        added = np.zeros_like(hidden)
        self.inner.step(step, hidden, added)
        self.mix.write(step.kernels, weights, added, x)

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        """What the sublayer would want for what it would read now."""
        return self.inner.foresee(kernels, self.mix.read(kernels, x)[0], ids)

    def innermost(self) -> BoundSublayer:
        """The inner sublayer's."""
        return self.inner.innermost()

    def reading(self, kernels: Kernels, x: Floats) -> Floats:
        """Of what the sublayer would read of the streams."""
        return self.inner.reading(kernels, self.mix.read(kernels, x)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperTrunk(Trunk):
    """Streams that begin as copies of the embedding.

    Attributes:
        head: how they end: as a `mean`, or as a sum `weighed` by a mix of their own.
    """

    streams: StreamForm
    head: Literal["mean", "weighed"]

    def last_parameters(self) -> list[Parameter]:
        """The mix of the head, where it has one, before norm and head."""
        mix = self.streams.head_parameters() if self.head == "weighed" else []
        return [*mix, *Trunk.last_parameters(self)]

    def bind(self, weights: Weights) -> BoundTrunk:
        """Join it to its weights."""
        plain = Trunk.bind(self, weights)
        streams, mix = self.streams, None
        if self.head == "weighed":
            mix = streams.bind(weights, streams.head, reads_only=True)
        return BoundHyperTrunk(
            plain.embedding,
            plain.head,
            plain.first_norm,
            plain.num_logits,
            num_streams=streams.count,
            mix=mix,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundHyperTrunk(BoundTrunk):
    """A trunk of streams, ready to compute.

    Attributes:
        mix: how the head reads them; None takes their mean.
    """

    num_streams: int = 1
    mix: Mixing | None = None

    def embed(self, step: Step) -> Floats:
        """The streams `[T, n D]` of the step's tokens."""
        return np.tile(BoundTrunk.embed(self, step), (1, self.num_streams))

    def logits(self, kernels: Kernels, x: Floats) -> Floats:
        """Logits `[R, V]` of rows `x [R, n D]` of the streams."""
        if self.mix is not None:
            return BoundTrunk.logits(self, kernels, self.mix.read(kernels, x)[0])
        first, *others = np.split(x, self.num_streams, axis=1)
        total = first.copy()
        for stream in others:  # one after the other: in one order, whatever the rows
            total += stream
        return BoundTrunk.logits(self, kernels, total * np.float32(1 / self.num_streams))
