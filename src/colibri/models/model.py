"""A model of any family: embed, layers, head, over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from colibri.errors import Cancelled
from colibri.formats import Floats
from colibri.kernels.api import (
    FFN,
    Attention,
    Batch,
    Head,
    Ints,
    Kernels,
    KVLayer,
    Matrix,
    RopeTable,
)
from colibri.kv import KVPool
from colibri.memory.expert_store import ExpertStore
from colibri.memory.prefetch import Prefetcher
from colibri.models.config import BaseConfig
from colibri.models.family import Family
from colibri.models.plan import Plan
from colibri.nn.moe import BoundMoE, LookAhead, RouteListener
from colibri.nn.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class BoundLayer:
    """One layer, ready to compute."""

    attention: Attention
    rope: Rope
    kv: KVLayer
    ffn: FFN | BoundMoE


NOTHING: Ints = np.empty(0, np.int32)
Predictor = Callable[
    [int, Floats], Ints
]  # a later layer, `x [T, D]` now -> experts, likeliest first


@dataclass(slots=True, eq=False)
class Model:
    """Weights bound to kernels, store and K/V pool; sequences live outside (`engine.session`).

    Attributes:
        prefetcher: what looks ahead.
        predictor: what it asks; by default the later layer's own router.
    """

    family: Family
    config: BaseConfig
    plan: Plan
    kernels: Kernels
    store: ExpertStore
    kv: KVPool
    embedding: Matrix
    layers: tuple[BoundLayer, ...]
    head: Head
    prefetcher: Prefetcher
    resources: ExitStack = field(default_factory=ExitStack)
    predictor: Predictor | None = None

    def forward(
        self,
        ids: Ints,
        batch: Batch,
        wanted: Ints,
        *,
        cancelled: Callable[[], bool] | None = None,
        routes: RouteListener | None = None,
    ) -> Floats:
        """Compute one step of `ids [T]` and return the logits `[R, V]` of the rows `wanted [R]`.

        The batch's blocks must be reserved before; K and V of all rows are written into them.
        `cancelled` is asked between layers; `routes` sees each sparse layer's routing.

        Raises:
            Cancelled: `cancelled` said so; K and V of this step are then incomplete and must be
                rewound. NumericsError, ReadError: from the layers.
        """
        x = self.kernels.embed(self.embedding, ids)
        look_ahead = self._begin_look_ahead(x)
        tables: dict[tuple[float, ...], RopeTable] = {}
        for layer in self.layers:
            if cancelled is not None and cancelled():
                raise Cancelled("the request was cancelled")
            rope = tables.get(layer.rope.key) or tables.setdefault(
                layer.rope.key, layer.rope.table(batch.positions)
            )
            self.kernels.attention_step(layer.attention, x, batch, rope, layer.kv)
            if isinstance(layer.ffn, BoundMoE):
                layer.ffn.step(self.kernels, self.store, x, batch, routes, look_ahead)
            else:
                self.kernels.ffn_step(layer.ffn, x)
        logits = self.kernels.head_step(self.head, x[wanted])
        if look_ahead is not None:
            self.prefetcher.end()
        return logits

    def _begin_look_ahead(self, x: Floats) -> LookAhead | None:
        """What each sparse layer of this step calls, with `x [T, D]` as it is then."""
        if not self.prefetcher.begin(len(x)):
            return None
        predict = self.predictor or self._foresee

        def look(layer: int, used: Ints) -> None:
            self.prefetcher.look(layer, used, lambda ahead: predict(ahead, x))

        return look

    def _foresee(self, layer: int, x: Floats) -> Ints:
        later = self.layers[layer].ffn
        return later.foresee(self.kernels, x) if isinstance(later, BoundMoE) else NOTHING

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
