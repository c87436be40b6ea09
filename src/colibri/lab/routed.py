"""A router and a predictor for benches: routing that is given, in place of what weights choose.

Random weights route at random, and a real model as its text has it; figures must not depend on
either. So a script says what each token chooses, layer by layer, and what would have been foreseen
of it. The model's own router is computed all the same, for a step must cost what it costs
everywhere; only its choice is put aside. So is that of the later layer when predictions are made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Floats
from colibri.kernels.api import Attention, Batch, Ints, KVLayer, RopeTable, Router, Routing
from colibri.lab.trace import Trace
from colibri.lab.working_set import BenchKernels
from colibri.models.model import Model
from colibri.nn.moe import BoundMoE

_SPREAD = 0.5  # of the chance that a prediction is wrong, from its mean to first and last rank


class Script:
    """What tokens choose, one after another, and from the beginning again when all have passed.

    Attributes:
        ids: `[T, L, A]` experts of each token in each MoE layer.
        recall: share of them that predictions name.
    """

    def __init__(self, ids: Ints, num_experts: int, recall: float = 0.0, seed: int = 0) -> None:
        """Predictions name A experts each, the wrong ones as popular as experts are."""
        self.ids, self.recall = ids, recall
        self._ascending = np.sort(ids, axis=2)
        self._foreseen = foreseen(ids, num_experts, recall, seed)
        self._first = self._count = 0

    @classmethod
    def of(cls, trace: Trace, recall: float = 0.0) -> Script:
        """The tokens of a trace in order."""
        return cls(token_ids(trace), trace.num_experts, recall)

    def choose(self, row: int, count: int) -> Ints:
        """Experts `[count, A]` in a MoE layer; its first one begins the next `count` tokens."""
        if row == 0:
            self._first += self._count
            self._count = count
        found: Ints = self.ids[self._window(count), row]
        return found

    def union(self, row: int, count: int) -> Ints:
        """Experts of `choose`, each once, ascending."""
        ascending: Ints = self._ascending[self._window(count), row]
        found: Ints = ascending[0] if count == 1 else np.unique(ascending)
        return found

    def foresee(self, row: int, count: int) -> Ints:
        """What is predicted of a later layer for the same tokens, likeliest first."""
        named = self._foreseen[self._window(count), row]
        ranked: Ints = named[0] if count == 1 else named.T.ravel()
        if count == 1:
            return ranked
        found: Ints = ranked[np.sort(np.unique(ranked, return_index=True)[1])]
        return found

    def coming(self, count: int) -> Ints:
        """Experts `[count, L, A]` of the next tokens."""
        found: Ints = self.ids[self._range(self._first + self._count, count)]
        return found

    @property
    def position(self) -> int:
        """How many tokens have passed."""
        return self._first + self._count

    def seek(self, token: int) -> None:
        """The next token is that one."""
        self._first, self._count = token, 0

    def _window(self, count: int) -> NDArray[np.intp] | slice:
        first = self._first % len(self.ids)
        if first + count <= len(self.ids):
            return slice(first, first + count)  # faster: steps must not wait for the bench
        return self._range(first, count)

    def _range(self, first: int, count: int) -> NDArray[np.intp]:
        return np.arange(first, first + count) % len(self.ids)


def token_ids(trace: Trace) -> Ints:
    """Experts `[T, L, A]` of a trace's tokens; those that lack a layer are left out."""
    order = np.lexsort((trace.rows, trace.positions, trace.passes))
    starts = np.flatnonzero(trace.rows[order] == 0)
    last = trace.num_layers - 1
    whole = starts[starts + last < len(order)]
    whole = whole[trace.rows[order[whole + last]] == last]
    found: Ints = trace.ids[order[whole[:, None] + np.arange(trace.num_layers)]]
    return found


def foreseen(ids: Ints, num_experts: int, recall: float, seed: int = 0) -> Ints:
    """Predictions `[T, L, A]` of `ids [T, L, A]`, likeliest first, right by `recall` on average.

    Routers foresee best what they like best: of the bundled model's four, the first is wrong half
    as often as the average, the last one and a half times. So it is here. What is wrong names an
    expert that was not chosen, drawn by how often the layer chooses it.
    """
    random = np.random.default_rng([seed, round(recall * 1e6)])
    T, L, A = ids.shape
    keys = ids + np.arange(L)[:, None] * num_experts
    counts = np.bincount(keys.ravel(), minlength=L * num_experts).reshape(L, num_experts)
    liking = np.log(counts + 0.5)
    spread = min(_SPREAD, recall / max(1e-9, 1 - recall))  # no chance exceeds 1
    ranks = np.linspace(-1, 1, A) if A > 1 else np.zeros(1)
    wrong_by_rank = (1 - recall) * (1 + spread * ranks)
    right = random.random(ids.shape) >= wrong_by_rank
    found = np.empty_like(ids)
    for token in range(T):
        draw = liking + random.gumbel(size=(L, num_experts))  # the largest: without replacement
        np.put_along_axis(draw, ids[token].astype(np.intp), -np.inf, axis=1)
        wrong = np.argsort(-draw, axis=1)[:, :A].astype(np.int32)
        found[token] = np.where(right[token], ids[token], wrong)
    return found


class RoutedKernels(BenchKernels):
    """Native kernels that route as a script says.

    Attributes:
        script: None leaves routing to the model.
        attention_s: time spent in attention so far.
    """

    script: Script | None = None
    attention_s = 0.0
    _row_of: dict[Router, int] | None = None

    def follow(self, script: Script, routers: Sequence[Router]) -> None:
        """Route as the script says; `routers` are those of the MoE layers, in order."""
        self.script, self._row_of = script, {router: row for row, router in enumerate(routers)}

    def route_step(self, layer: Router, x: Floats, given: Ints | None = None) -> Routing:
        """See `Kernels.route_step`; the experts are the script's."""
        routing = super().route_step(layer, x, given)
        if self.script is None or self._row_of is None:
            return routing
        row, script = self._row_of[layer], self.script
        routing.ids[...] = script.choose(row, len(x))
        experts = script.union(row, len(x))
        found = Routing(routing.hidden, routing.ids, routing.weights, experts, routing.shared)
        if self._routing is not None:  # the library's struct serves on
            self._routing = found, self._routing[1]
        return found

    def foresee(self, layer: Router, x: Floats) -> Ints:
        """What is predicted of a later layer, at the price of its router."""
        assert self.script is not None
        assert self._row_of is not None
        super().route_step(layer, x)
        return self.script.foresee(self._row_of[layer], len(x))

    def attention_step(
        self,
        layer: Attention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        y: Floats | None = None,
    ) -> None:
        """See `Kernels.attention_step`; timed."""
        start = time.perf_counter()
        super().attention_step(layer, x, batch, rope, kv, y)
        self.attention_s += time.perf_counter() - start


def sparse_layers(model: Model) -> list[BoundMoE]:
    """The layers with routed experts, in order."""
    found = (each.innermost() for layer in model.layers for each in layer.sublayers)
    return [each for each in found if isinstance(each, BoundMoE)]


def direct_model(model: Model, kernels: RoutedKernels, script: Script) -> None:
    """Make a model follow a script, and look ahead by it."""
    kernels.follow(script, [moe.router for moe in sparse_layers(model)])
    sublayers = (each for layer in model.layers for each in layer.sublayers)
    around = {
        moe.layer: (each, moe.router)
        for each in sublayers
        if isinstance(moe := each.innermost(), BoundMoE)
    }

    def predict(layer: int, x: Floats) -> Ints:
        outer, router = around[layer]
        return kernels.foresee(router, outer.reading(kernels, x))

    model.predictor = predict
