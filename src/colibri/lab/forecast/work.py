"""What a token and a prompt need: bytes by format and by where they lie, and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from colibri.kernels.api import KV_BLOCK
from colibri.models.description import Description
from colibri.models.plan import Plan

_EMBEDDING, _SHARED = "embed_tokens", "shared_expert"


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer of routed experts: each token uses `active` of `num_experts`.

    `weights` are those of one expert, `record_bytes` its bytes, in `format`.
    """

    num_experts: int
    active: int
    record_bytes: int
    weights: int
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model's part of a forecast.

    Attributes:
        num_layers: all layers.
        dense_bytes: that every token reads, by format; of an embedding one row is read.
        dense_weights: the same as numbers, by format.
        shared_bytes: those of `dense_bytes` that belong to shared experts.
        sparse: layers of routed experts.
        kv_bytes_per_position: that attention looks back on, all layers together.
        table_bytes: read from disk by every token beside experts.
        chunk: prompt tokens of a pass.
    """

    num_layers: int
    dense_bytes: Mapping[str, int]
    dense_weights: Mapping[str, int]
    shared_bytes: int
    sparse: tuple[SparseLayer, ...]
    kv_bytes_per_position: float
    table_bytes: int
    chunk: int

    @property
    def routed_bytes(self) -> int:
        """Of experts, for one token."""
        return sum(layer.active * layer.record_bytes for layer in self.sparse)

    @property
    def expert_formats(self) -> dict[str, int]:
        """The same by format."""
        found: Counter[str] = Counter()
        for layer in self.sparse:
            found[layer.format] += layer.active * layer.record_bytes
        return dict(found)

    @property
    def formats(self) -> set[str]:
        """All of them."""
        return {*self.dense_bytes, *self.expert_formats}


def work_of(description: Description, plan: Plan) -> Work:
    """The work of a model under a plan."""
    nbytes: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    shared = 0
    for tensor in description.dense:
        name, (rows, columns) = tensor.parameter.name, tensor.shape
        if _EMBEDDING in name and not description.blueprint.trunk.tied:
            continue
        nbytes[tensor.resident.name] += tensor.resident_nbytes
        weights[tensor.resident.name] += rows * columns
        shared += tensor.resident_nbytes if _SHARED in name else 0
    active = {
        number: moe.num_experts_per_tok for number, moe in description.blueprint.sparse_layers()
    }
    sparse = tuple(
        SparseLayer(
            layout.num_experts,
            active[layout.layer],
            layout.record_nbytes,
            sum(part.rows * part.columns for part in layout.parts),
            layout.parts[0].format.name,
        )
        for layout in description.experts.layers
        if layout.layer in active
    )
    return Work(
        num_layers=len(description.blueprint.layers),
        dense_bytes=dict(nbytes),
        dense_weights=dict(weights),
        shared_bytes=shared,
        sparse=sparse,
        kv_bytes_per_position=plan.kv_bytes / max(1, plan.num_kv_blocks * KV_BLOCK),
        table_bytes=plan.table_bytes_per_token,
        chunk=plan.prefill_chunk,
    )
