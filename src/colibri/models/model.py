"""A model of any family: embed, layers, head, over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colibri.errors import Cancelled
from colibri.formats import Floats
from colibri.kernels.api import Batch, Ints, Kernels
from colibri.kv import KVPool
from colibri.memory.expert_store import ExpertStore
from colibri.memory.prefetch import Prefetcher
from colibri.memory.row_table import RowTable
from colibri.models.config import BaseConfig
from colibri.models.family import Family
from colibri.models.plan import Plan
from colibri.nn.drafting import BoundDraftingHead, normed
from colibri.nn.sublayer import NOTHING, BoundSublayer, LookAhead, RouteListener, Step
from colibri.nn.trunk import BoundTrunk
from colibri.spans import Spans


@dataclass(frozen=True, slots=True, eq=False)
class BoundLayer:
    """One layer, ready to compute."""

    sublayers: tuple[BoundSublayer, ...]

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        """Experts, likeliest first, that the layer would want for an earlier state `x`."""
        found = (each.foresee(kernels, x, ids) for each in self.sublayers)
        return next((experts for experts in found if experts.size), NOTHING)


# A later layer, the residual stream now -> its experts, likeliest first.
Predictor = Callable[[int, Floats], Ints]


@dataclass(slots=True, eq=False)
class Model:
    """Weights bound to kernels, store and K/V pool; sequences live outside (`engine.session`).

    Attributes:
        heads: that draft further tokens, where they are loaded.
        prefetcher: what looks ahead.
        predictor: what it asks; by default the later layer's own router.
        spans: where every step is written down, if it is.
        tables: what stays on disk beside the experts.
    """

    family: Family
    config: BaseConfig
    plan: Plan
    kernels: Kernels
    store: ExpertStore
    kv: KVPool
    trunk: BoundTrunk
    layers: tuple[BoundLayer, ...]
    prefetcher: Prefetcher
    heads: tuple[BoundDraftingHead, ...] = ()
    resources: ExitStack = field(default_factory=ExitStack)
    predictor: Predictor | None = None
    spans: Spans | None = None
    tables: tuple[RowTable, ...] = ()

    def forward(
        self,
        ids: Ints,
        batch: Batch,
        wanted: Ints,
        *,
        leaving: Callable[[], Sequence[int]] | None = None,
        routes: RouteListener | None = None,
    ) -> Floats:
        """Compute one step of `ids [T]` and return the logits `[R, V]` of the rows `wanted [R]`.

        The batch's blocks must be reserved before; K and V of all rows are written into them.
        `leaving` is asked before each layer which members of the batch have left since; their rows
        go no further, have no logits, and what they wrote must be rewound. `routes` sees each
        sparse layer's routing.

        Raises:
            Cancelled: all members have left.
            NumericsError, ReadError: from the layers.
        """
        step = Step(self.kernels, self.store, batch, ids, routes)
        if self.spans is None:
            return self._run(step, wanted, leaving)
        with self.spans.span("forward", rows=len(ids)):
            logits = self._run(step, wanted, leaving)
        self.spans.flush()
        return logits

    def draft(self, ids: Ints, batch: Batch, following: Ints) -> list[Floats]:
        """One step of `ids [T]`; the logits `[T, V]` of each drafting head behind every row.

        `following [T, heads]` are the tokens after each row; head k, which is told the first
        k + 1 of them, foresees the one after these. See `forward` for the rest.
        """
        kernels = self.kernels
        step = Step(kernels, self.store, batch, ids)
        x = self.trunk.embed(step)
        for layer in self.layers:
            for sublayer in layer.sublayers:
                sublayer.step(step, x, x)
        norm, found = self.trunk.head.norm, []
        for number, head in enumerate(self.heads):
            step = Step(kernels, self.store, batch, np.ascontiguousarray(following[:, number]))
            x = head.step(step, self.trunk.embed(step), normed(kernels, norm, x))
            norm = head.norm
            found.append(self.trunk.behind(norm).logits(kernels, x))
        return found

    def _run(self, step: Step, wanted: Ints, leaving: Callable[[], Sequence[int]] | None) -> Floats:
        x = self.trunk.embed(step)
        look_ahead = step.look_ahead = self._begin_look_ahead(x, step.ids)
        for number, layer in enumerate(self.layers):
            left = () if leaving is None else leaving()
            if len(left):
                keep = ~np.isin(step.batch.members, left)
                x, step, wanted = x[keep], step.narrowed(keep), renumbered(wanted, keep)
                step.look_ahead = None  # it looks at the rows that were there
                if not len(x):
                    raise Cancelled("the request was cancelled")
            for sublayer in layer.sublayers:
                if self.spans is None:
                    sublayer.step(step, x, x)
                    continue
                name = type(sublayer).__name__.removeprefix("Bound")
                with self.spans.span(f"layer {number}: {name}", layer=number):
                    sublayer.step(step, x, x)
        logits = self.trunk.logits(self.kernels, x[wanted])
        if look_ahead is not None:
            self.prefetcher.end()
        return logits

    def _begin_look_ahead(self, x: Floats, ids: Ints) -> LookAhead | None:
        """What each sparse layer of this step calls, with `x [T, D]` as it is then."""
        if not self.prefetcher.begin(len(x)):
            return None

        def foresee(layer: int, x: Floats) -> Ints:
            return self.layers[layer].foresee(self.kernels, x, ids)

        predict = self.predictor or foresee

        def look(layer: int, used: Ints) -> None:
            self.prefetcher.look(layer, used, lambda ahead: predict(ahead, x))

        return look

    def close(self) -> None:
        """Stop the reader and give the memory back; the model is unusable afterwards."""
        self.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def renumbered(rows: Ints, keep: NDArray[np.bool_]) -> Ints:
    """Those of `rows [R]` that are kept, counted among the kept `[T]`."""
    numbers = np.cumsum(keep, dtype=np.int32) - np.int32(1)
    found: Ints = numbers[rows[keep[rows]]]
    return found
