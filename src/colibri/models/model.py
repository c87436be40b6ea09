"""A model of any family: embed, layers, head, over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

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
from colibri.models.config import BaseConfig
from colibri.models.family import Family
from colibri.models.plan import Plan
from colibri.nn.moe import BoundMoE, RouteListener
from colibri.nn.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class BoundLayer:
    """One layer, ready to compute."""

    attention: Attention
    rope: Rope
    kv: KVLayer
    ffn: FFN | BoundMoE


@dataclass(slots=True, eq=False)
class Model:
    """Weights bound to kernels, store and K/V pool; sequences live outside (`engine.session`)."""

    family: Family
    config: BaseConfig
    plan: Plan
    kernels: Kernels
    store: ExpertStore
    kv: KVPool
    embedding: Matrix
    layers: tuple[BoundLayer, ...]
    head: Head
    resources: ExitStack = field(default_factory=ExitStack)

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
        tables: dict[tuple[float, ...], RopeTable] = {}
        for layer in self.layers:
            if cancelled is not None and cancelled():
                raise Cancelled("the request was cancelled")
            rope = tables.get(layer.rope.key) or tables.setdefault(
                layer.rope.key, layer.rope.table(batch.positions)
            )
            self.kernels.attention_step(layer.attention, x, batch, rope, layer.kv)
            if isinstance(layer.ffn, BoundMoE):
                layer.ffn.step(self.kernels, self.store, x, batch, routes)
            else:
                self.kernels.ffn_step(layer.ffn, x)
        return self.kernels.head_step(self.head, x[wanted])

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
