"""The boundary between what people read and what is fast: operations, and the weights they take.

A layer is three calls: `attention_step`, then `route_step` and `moe_step` (or `ffn_step` where the
layer is dense). `x [T, D]` float32 is the residual stream; a step reads it and adds to `y`, which
is `x` itself unless the model has more to do with the result. Rows of `x` are tokens of any number
of sequences; what a row computes depends on that row and its own sequence alone, never on its
neighbours, on threads or on chunking (docs/ARCHITECTURE.md, "Numerics").
`kernels.reference` computes with NumPy and owes the stated tolerance; `kernels.native` owes bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Bytes, FloatFormat, Floats, Format, RowInt8Format
from colibri.kernels.gated import GatedStreamKernels
from colibri.kernels.heads import HeadKernels, Heads
from colibri.kernels.latent import NO_LATENTS, LatentKernels, LatentLimits
from colibri.kernels.recurrent_api import RecurrentKernels, RowKernels
from colibri.kernels.shared_key import SharedKeyKernels
from colibri.kernels.streams import StreamKernels

Ints: TypeAlias = NDArray[np.int32]

Scoring: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]

KV_BLOCK = 64  # positions in one block of the K/V pool; attention sums keys block by block
KV_UNIT = 64  # a pool whose blocks may overlap: tables then count in these bytes
EMPTY, LOADING, READY, FAILED = 0, 1, 2, 3  # the states of a slot


class Activations(StrEnum):
    """How inputs of integer-coded matrices are coded; float matrices always take float32."""

    FLOAT32 = "float32"
    INT16 = "int16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A resident matrix `y = W x + bias`.

    Attributes:
        format: how `data` is coded.
        rows: outputs N.
        columns: inputs K.
        data: resident bytes `[format.resident_nbytes((N, K))]`, 64-byte aligned.
        bias: `[N]` float32, or None.
    """

    format: Format
    rows: int
    columns: int
    data: Bytes
    bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm: `x / sqrt(mean(x^2) + eps) * weight`, the mean over the last axis."""

    weight: Floats
    eps: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Attention(Heads):
    """Grouped-query attention with its input norm and projections, which come with their biases."""

    norm: Norm
    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix


@dataclass(frozen=True, slots=True)
class Swiglu:
    """`g * sigmoid(alpha g) * (u + offset)`, with `g = min(gate x, limit)`, `|u| <= limit`.

    The plain SwiGLU has neither; gpt-oss has alpha 1.702, limit 7 and offset 1.
    """

    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0


PLAIN = Swiglu()


@dataclass(frozen=True, slots=True, eq=False)
class FFN:
    """`down(act(gate x, up x))`; with `norm`, which comes first, a whole dense layer."""

    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix
    norm: Norm | None = None
    activation: Literal["silu"] = "silu"
    swiglu: Swiglu = PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Norm, logits `gate h`, scores p, choice, weights; ties go to the lowest id.

    Without a norm, rows are taken as they are.

    The last `num_shared` rows of `gate` are those of shared experts, which are not chosen but
    always used, and weighed like chosen ones.

    Scores are the softmax over all experts, each logit's sigmoid, or the root of its softplus.
    Experts are chosen by `c = p + bias`: with groups, only among those of the `num_groups_used`
    groups whose `group_top` best c have the largest sum (DeepSeek-V2 takes 1, V3 takes 2). Weights
    are `p` of the chosen, `/ (sum + epsilon)` where `normalize`, then `* factor`.

    Attributes:
        bias: `[E]`, or None.
    """

    norm: Norm | None
    gate: Matrix
    num_experts_per_tok: int
    normalize: bool
    scoring: Scoring = "softmax"
    bias: Floats | None = None
    num_groups: int = 1
    num_groups_used: int = 1
    group_top: int = 2
    epsilon: float = 0.0
    factor: float = 1.0
    num_shared: int = 0

    @property
    def num_routed(self) -> int:
        """Experts that are chosen from."""
        return self.gate.rows - self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One matrix of an expert's record; panel p starts at the part's offset + p * panel_stride."""

    name: Literal["gate_proj", "up_proj", "down_proj"]
    format: Format
    rows: int
    columns: int
    panel_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The routed experts of one layer, whose bytes lie in slots, and its resident shared expert.

    `y = sum_e w_e GLU_e(h)`, added as fma(w_e, d_e, y) by ascending expert id from 0, then `+
    sigmoid(shared_gate h) * shared(h)` (without `shared_gate`: `+ shared(h)`).
    """

    num_experts: int
    gate_proj: ExpertPart
    up_proj: ExpertPart
    down_proj: ExpertPart
    activation: Literal["silu"] = "silu"
    shared: FFN | None = None
    shared_gate: Matrix | None = None
    swiglu: Swiglu = PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Final norm, where there is one, and output projection."""

    norm: Norm | None
    lm_head: Matrix


@dataclass(frozen=True, slots=True)
class Batch:
    """Which token each row of `x` is.

    Attributes:
        positions: `[T]` position of the row's token in its sequence.
        members: `[T]` index of the row's sequence in `block_tables`.
        block_tables: `[S, B]` blocks of the K/V pool that hold positions 0-63, 64-127, … of each
            sequence (-1 = none yet).
        cells: `[S]` the cell of fixed-size state of each sequence (-1 where the model keeps none).
    """

    positions: Ints
    members: Ints
    block_tables: Ints
    cells: Ints = field(default_factory=lambda: np.full(1, -1, np.int32))

    def narrowed(self, keep: NDArray[np.bool_] | slice) -> Batch:
        """Rows `keep [T]` only, of the same sequences."""
        return replace(self, positions=self.positions[keep], members=self.members[keep])


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine `[T, rotary_dim / 2]` of a batch, computed in float64 and rounded once."""

    cos: Floats
    sin: Floats


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """One attention layer's share of the K/V pool.

    Block b holds, from byte `b * block_nbytes + offset`: K `[K, head_dim, 64]`, then V `[K, 64,
    head_dim]`, in `format`: each takes the bytes of the format's matrix `[K * 64, head_dim]`, and
    scales of int8 `[K, 64]` follow both. Keys lie transposed so that scores grow side by side.
    """

    pool: Bytes
    format: FloatFormat | RowInt8Format
    block_nbytes: int
    offset: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class KVPlane:
    """One plane of a layer in the pool: what each position, or each `stride` positions, keep.

    Block b holds, from byte `b * block_nbytes + offset`, the format's matrix `[heads * entries,
    width]`, where a block's `entries` are `max(1, 64 / stride)`. The entry of the positions from
    `w * stride` to `(w + 1) * stride - 1` lies in the block of the last of them.
    """

    pool: Bytes
    format: FloatFormat | RowInt8Format
    block_nbytes: int
    offset: int
    heads: int
    width: int
    stride: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class CellLayer:
    """One recurrent layer's share of the state cells, which every sequence has one of.

    Cell c holds, from byte `c * cell_nbytes + offset`, `nbytes` bytes that are zero when a sequence
    begins; the layer alone knows what they mean.
    """

    pool: Bytes
    cell_nbytes: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Routing:
    """What `route_step` found.

    Attributes:
        hidden: `[T, D]` the normed input of the experts.
        ids: `[T, A]` chosen experts, by descending choice, or as they were given.
        weights: `[T, A]` their weights.
        experts: `[n]` the union of `ids`, ascending.
        shared: `[T, num_shared]` weights of shared experts, where the router has such.
    """

    hidden: Floats
    ids: Ints
    weights: Floats
    experts: Ints
    shared: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where leased experts lie. `states` is written by the reader while `moe_step` looks on.

    Attributes:
        arena: all slots, one private anonymous mapping.
        parts: `[num_slots, 3]` int64, byte offset in `arena` of the slot's gate, up and down part.
        states: `[num_slots]` EMPTY, LOADING, READY or FAILED.
        wait: blocks until that slot is no longer LOADING (used by the reference; native code waits
            on the state itself).
        biases: `[num_slots, 3]` int64, byte offset of the float32 biases of gate, up and down, each
            a multiple of 4; None where experts have none.
    """

    arena: Bytes
    parts: NDArray[np.int64]
    states: Ints
    wait: Callable[[int], None]
    biases: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that will be asked for; it sizes the workspace before anything is loaded."""

    rows: int
    hidden_size: int
    attention_width: int  # (H + 2 K) * head_dim of the widest layer, 2 H more with gates
    intermediate_size: int  # of the widest FFN or expert
    num_experts: int
    num_experts_per_tok: int
    vocab_size: int
    latent: LatentLimits = NO_LATENTS


class SlotFailed(Exception):  # noqa: N818  (a signal to the store, which knows the file and raises ReadError)
    """`moe_step` met a slot whose read failed."""

    def __init__(self, slot: int) -> None:
        """`slot` is the index of the failed slot."""
        super().__init__(f"slot {slot} failed to load")
        self.slot = slot


class NonFiniteRow(Exception):  # noqa: N818  (a signal to the layer, which knows its number and raises NumericsError)
    """`route_step` met a router row that is not finite."""

    def __init__(self, row: int) -> None:
        """`row` indexes the batch."""
        super().__init__(f"router row {row} is not finite")
        self.row = row


class Kernels(
    GatedStreamKernels,
    HeadKernels,
    LatentKernels,
    RowKernels,
    RecurrentKernels,
    SharedKeyKernels,
    StreamKernels,
    Protocol,
):
    """The operations; implementations keep no state of a sequence, one serves one engine."""

    name: str
    activations: Activations

    def workspace_nbytes(self, limits: Limits) -> int:
        """Bytes that `reserve(limits)` will take."""

    def reserve(self, limits: Limits) -> None:
        """Allocate the workspace once; later steps within `limits` allocate nothing."""

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        """Rows `ids [T]` of the embedding, `[T, D]`."""

    def attention_step(
        self,
        layer: Attention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        y: Floats | None = None,
    ) -> None:
        """`y += o_proj(attention(norm(x)))`; K and V are rounded into the pool, read from there.

        `y` None is `x` itself.
        """

    def ffn_step(self, layer: FFN, x: Floats, y: Floats | None = None) -> None:
        """`y += ffn(norm(x))`; `y` None is `x` itself."""

    def route_step(self, layer: Router, x: Floats, given: Ints | None = None) -> Routing:
        """Norm and route; `given [T, A]` are experts that are chosen already.

        Raises NonFiniteRow.
        """

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Slots, y: Floats
    ) -> None:
        """Add to `y [T, D]` what `experts [n]`, which lie in `slots [n]`, contribute.

        `experts` ascend and are part of `routing.experts`; `y` starts at zero, and a layer's
        experts may come in several calls, ascending. Waits for slots that are LOADING, computing
        what is READY meanwhile. Raises SlotFailed.
        """

    def moe_finish(self, layer: Experts, routing: Routing, y: Floats, x: Floats) -> None:
        """Add the shared expert to `y`, then `x += y`."""

    def head_step(self, layer: Head, x: Floats) -> Floats:
        """Logits `[T, V]` of the rows of `x`."""

    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """`[T, K] -> [T, N]`, as every step above computes it."""
