"""Sublayers, which layers are made of: each adds a function of the residual stream to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertLayer, ExpertLayerLayout
from colibri.formats import Floats
from colibri.kernels.api import Batch, Ints, Kernels, RopeTable, Routing
from colibri.kernels.latent import NO_LATENTS, LatentLimits
from colibri.kv import LayerState, Ring, StateShape
from colibri.memory.expert_store import ExpertStore
from colibri.nn.parameter import Parameter, Weights
from colibri.nn.rope import Rope

RouteListener: TypeAlias = Callable[[int, Routing], None]
Turn: TypeAlias = tuple[Ints | None, Batch]  # rows [R] (None: all), and their batch
LookAhead: TypeAlias = Callable[[int, Ints], None]  # layer, experts leased for it

NOTHING: Ints = np.empty(0, np.int32)
RUN_ROWS = 128  # of a step that sublayers with wide arrays compute at a time


@dataclass(slots=True, eq=False)
class Step:
    """One pass through the model: what its sublayers share.

    Attributes:
        ids: `[T]` the tokens.
        routes: sees each sparse layer's routing.
        look_ahead: called when what a sparse layer reads is under way, before it is waited for.
    """

    kernels: Kernels
    store: ExpertStore
    batch: Batch
    ids: Ints
    routes: RouteListener | None = None
    look_ahead: LookAhead | None = None
    _tables: dict[tuple[float, ...], RopeTable] = field(default_factory=dict)
    _selections: dict[tuple[int, int], Ints] = field(default_factory=dict)
    _turns: dict[Ring, Sequence[Turn]] = field(default_factory=dict)
    _runs: list[tuple[slice, Step]] = field(default_factory=list)

    def runs(self) -> Sequence[tuple[slice, Step]]:
        """The rows in order, so many at a time, each run as a step of its own.

        What a row finds depends on no row behind it, so that no bit does on the runs; arrays of a
        sublayer then take the room of a run. What such steps select stands for the layers after.
        """
        count = len(self.ids)
        if not self._runs and count <= RUN_ROWS:
            self._runs.append((slice(None), self))
        for first in range(0, 0 if self._runs else count, RUN_ROWS):
            rows = slice(first, first + RUN_ROWS)
            batch = self.batch.narrowed(rows)
            self._runs.append((rows, Step(self.kernels, self.store, batch, self.ids[rows])))
        return self._runs

    def turns(self, ring: Ring | None) -> Sequence[Turn]:
        """The rows that attend together, in order: all at once, unless keys lie in a ring."""
        if ring is None:
            return ((None, self.batch),)
        found = self._turns.get(ring)
        if found is None:
            found = self._turns[ring] = tuple(ring.turns(self.batch))
        return found

    def narrowed(self, keep: NDArray[np.bool_]) -> Step:
        """The rest of the pass for rows `keep [T]` only; what was selected for them stands."""
        selected = {key: found[keep] for key, found in self._selections.items()}
        batch, look = self.batch.narrowed(keep), self.look_ahead
        ids = self.ids[keep]
        return Step(self.kernels, self.store, batch, ids, self.routes, look, _selections=selected)

    def rope(self, rope: Rope, back: int = 0) -> RopeTable:
        """Cosine and sine of the batch's positions, computed once for equal embeddings.

        Of those that lie `back` positions before them (no further than 0), if asked.
        """
        key = (*rope.key, back)
        found = self._tables.get(key)
        if found is None:
            positions = np.maximum(self.batch.positions - np.int32(back), 0)
            found = self._tables[key] = rope.table(positions)
        return found

    def no_rope(self) -> RopeTable:
        """The table of layers that rotate nothing."""
        found = self._tables.get(())
        if found is None:
            nothing = np.empty((len(self.batch.positions), 0), np.float32)
            found = self._tables[()] = RopeTable(nothing, nothing)
        return found

    def selection(self, top_k: int, stride: int = 1) -> Ints | None:
        """`[T, top_k]`: keys that one layer selects and the layers after it may use.

        A row has one for every `stride` positions. None where no row has more than `top_k`: then
        all are used.
        """
        if (int(self.batch.positions.max(initial=0)) + 1) // stride <= top_k:
            return None
        found = self._selections.get((top_k, stride))
        if found is None:
            shape = (len(self.batch.positions), top_k)
            found = self._selections[top_k, stride] = np.empty(shape, np.int32)
        return found


@dataclass(frozen=True, slots=True)
class Demand:
    """The largest operands of a sublayer; they size the workspace (`kernels.api.Limits`).

    Attributes:
        array_width: floats that the sublayer's own arrays take for each row of a step.
        run_width: the same for each row of a run (`Step.runs`).
    """

    attention_width: int = 0
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    array_width: int = 0
    run_width: int = 0
    latent: LatentLimits = NO_LATENTS

    def array_floats(self, rows: int) -> int:
        """Floats that the sublayer's own arrays take in a step of so many rows."""
        return rows * self.array_width + min(rows, RUN_ROWS) * self.run_width

    @classmethod
    def largest(cls, demands: Iterable[Demand]) -> Demand:
        """Each number's maximum."""
        every = list(demands)
        numbers = [item.name for item in fields(cls) if item.name != "latent"]
        most = {n: max((getattr(d, n) for d in every), default=0) for n in numbers}
        return cls(**most, latent=LatentLimits.largest(demand.latent for demand in every))


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where a sublayer is bound: its layer's place in one checkpoint and one pool.

    Attributes:
        prefix: of the layer's tensors; ends with a dot.
        state: of this sublayer.
        experts: the layer's routed experts, where it has any.
    """

    layer: int
    prefix: str
    weights: Weights
    state: LayerState
    experts: ExpertLayerLayout | None


class BoundSublayer(ABC):
    """A sublayer, ready to compute."""

    __slots__ = ()

    @abstractmethod
    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """Add `f(x)` to `y`; both are `[T, D]`, and may be the same array."""

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        """Experts, likeliest first, that this sublayer would want for an earlier state `x`.

        `ids [T]` are the tokens.
        """
        return NOTHING

    def innermost(self) -> BoundSublayer:
        """The sublayer itself, without what it may be wrapped in."""
        return self

    def reading(self, kernels: Kernels, x: Floats) -> Floats:
        """What the innermost sublayer reads `[T, D]` of a state `x`."""
        return x


class Sublayer(ABC):
    """The declaration: sizes, switches and names, without weights."""

    __slots__ = ()

    @property
    def state(self) -> StateShape:
        """What it keeps of a sequence."""
        return StateShape()

    @property
    def demand(self) -> Demand:
        """What the kernels need room for."""
        return Demand()

    @abstractmethod
    def parameters(self, prefix: str) -> list[Parameter]:
        """Dense tensors under `prefix`, which ends with the layer's dot."""

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer | None:
        """What the checkpoint must hold of routed experts."""
        return None

    @abstractmethod
    def bind(self, site: Site) -> BoundSublayer:
        """Join it to its weights and state."""


@dataclass(frozen=True, slots=True, init=False)
class Layer:
    """Sublayers in the order of the forward pass; by default attention, then a feed-forward."""

    sublayers: tuple[Sublayer, ...]

    def __init__(self, *sublayers: Sublayer) -> None:
        """At most one of them has routed experts."""
        object.__setattr__(self, "sublayers", sublayers)

    @property
    def num_experts_per_tok(self) -> int:
        """Routed experts that one token uses; 0 for a dense layer."""
        return self.demand.num_experts_per_tok

    @property
    def demand(self) -> Demand:
        """What the kernels need room for."""
        return Demand.largest(each.demand for each in self.sublayers)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Dense tensors under `prefix`, which ends with the layer's dot."""
        return [found for each in self.sublayers for found in each.parameters(prefix)]

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer | None:
        """What the checkpoint must hold of routed experts."""
        found = (each.expert_layer(layer, prefix) for each in self.sublayers)
        return next((experts for experts in found if experts is not None), None)
