"""DeepSeek-V4's attention: a window of shared keys, and entries that compress the whole past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from colibri.formats import Floats
from colibri.kernels.api import CellLayer, Ints, KVPlane, Matrix
from colibri.kernels.latent import LatentLimits, entries_per_block
from colibri.kernels.recurrent_api import GroupNorm, Projections
from colibri.kernels.shared_key import (
    WINDOW_SLACK,
    EntryIndexer,
    Pooling,
    SharedKeyAttention,
    SharedKeyCache,
    pooling_state_nbytes,
)
from colibri.kv import Plane, StateShape, Window
from colibri.nn.cell import shares, shares_nbytes
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.rope import Rope
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


class SharedKeyConfig(Protocol):
    """The config keys that such attention reads."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def num_attention_heads(self) -> int:
        """H."""

    @property
    def head_width(self) -> int:
        """Width of a head, and of a key."""

    @property
    def q_lora_rank(self) -> int:
        """Width of the query latent."""

    @property
    def o_groups(self) -> int:
        """Runs of heads that are projected apart."""

    @property
    def o_lora_rank(self) -> int:
        """Width that each of them is projected to."""

    @property
    def sliding_window(self) -> int:
        """Positions that a row sees one by one."""

    @property
    def norm(self) -> RMSNorm:
        """Every norm of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndex:
    """How entries are selected where a row has more than `top_k`; its keys are entries too."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Entries of `stride` positions.

    Attributes:
        overlap: whether an entry takes in the `stride` positions before its own.
        index: None sees all entries.
    """

    stride: int
    overlap: bool = False
    index: EntryIndex | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(Sublayer):
    """Norm, low-rank q, one key and value, softmax with sinks, output projection in two steps.

    Heads of q are normed without weights. The output's heads are projected in groups of their own
    (`o_a_proj`), then together (`o_b_proj`).

    Attributes:
        compression: None sees the window alone.
        rope: of q and k, and of entries; the trailing dims of a head are rotated.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    q_rank: int
    groups: int
    group_rank: int
    window: int
    norm: RMSNorm
    rope: Rope
    compression: Compression | None = None

    @classmethod
    def from_config(
        cls, cfg: SharedKeyConfig, rope: Rope, compression: Compression | None
    ) -> CompressedAttention:
        """Sizes from the config; what differs from layer to layer beside it."""
        return cls(
            hidden_size=cfg.hidden_size,
            num_heads=cfg.num_attention_heads,
            head_dim=cfg.head_width,
            q_rank=cfg.q_lora_rank,
            groups=cfg.o_groups,
            group_rank=cfg.o_lora_rank,
            window=cfg.sliding_window,
            norm=cfg.norm,
            rope=rope,
            compression=compression,
        )

    @property
    def width(self) -> int:
        """Columns of q."""
        return self.num_heads * self.head_dim

    @property
    def entry_widths(self) -> list[int]:
        """Width of an entry, and of an index key where there are any."""
        compression = self.compression
        if compression is None:
            return []
        index = compression.index
        return [self.head_dim, *([] if index is None else [index.head_dim])]

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of what each pooling keeps."""
        overlap = self.compression is not None and self.compression.overlap
        return [pooling_state_nbytes(width, overlap=overlap) for width in self.entry_widths]

    @property
    def state(self) -> StateShape:
        """Entries, the sums of those that are not complete, and the keys of the window."""
        stride = 1 if self.compression is None else self.compression.stride
        entries = tuple(Plane(1, width, stride) for width in self.entry_widths)
        window = Window(self.head_dim, self.window + WINDOW_SLACK)
        return StateShape(entries, shares_nbytes(self.state_sizes), (window,))

    @property
    def demand(self) -> Demand:
        """Sizes of a head and of the indexer; q, what is found, values and gates as arrays."""
        index = None if self.compression is None else self.compression.index
        stride = 1 if self.compression is None else self.compression.stride
        heads, dim = (0, 0) if index is None else (index.num_heads, index.head_dim)
        limits = LatentLimits(
            heads=self.num_heads,
            q_rank=self.q_rank,
            head_dim=self.head_dim,
            rank=self.head_dim,
            key=self.head_dim,
            index_heads=heads,
            index_dim=dim,
            index_per_block=0 if index is None else entries_per_block(stride),
        )
        arrays = 4 * self.width + 2 * self.groups * self.group_rank + 3 * heads * dim
        top_k = 0 if index is None else index.top_k
        return Demand(
            attention_width=self.width,
            run_width=arrays + 9 * self.head_dim + 5 * dim + 2 * self.q_rank + top_k,
            latent=limits,
        )

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norms, projections, sinks, and those of entries."""
        attn, hidden, norm = f"{prefix}self_attn.", self.hidden_size, self.norm
        found = [
            norm.parameter(f"{prefix}input_layernorm", hidden),
            *linear(f"{attn}q_a_proj", self.q_rank, hidden),
            norm.parameter(f"{attn}q_a_norm", self.q_rank),
            *linear(f"{attn}q_b_proj", self.width, self.q_rank),
            *linear(f"{attn}kv_proj", self.head_dim, hidden),
            norm.parameter(f"{attn}kv_norm", self.head_dim),
            Parameter(f"{attn}sinks", (self.num_heads,), "bias"),
            *linear(f"{attn}o_a_proj", self.groups * self.group_rank, self.width // self.groups),
            *linear(f"{attn}o_b_proj", hidden, self.groups * self.group_rank),
        ]
        compression = self.compression
        if compression is None:
            return found
        found += self._pooling_parameters(compression, f"{attn}compressor.", self.head_dim)
        if (index := compression.index) is not None:
            name = f"{attn}compressor.indexer."
            found += self._pooling_parameters(compression, name, index.head_dim)
            found += linear(f"{name}q_b_proj", index.num_heads * index.head_dim, self.q_rank)
            weights = (index.num_heads, hidden)
            found.append(Parameter(f"{name}scorer.weights_proj.weight", weights, "router"))
        return found

    def _pooling_parameters(
        self, compression: Compression, prefix: str, width: int
    ) -> list[Parameter]:
        columns = 2 * width if compression.overlap else width
        return [
            *linear(f"{prefix}kv_proj", columns, self.hidden_size),
            *linear(f"{prefix}gate_proj", columns, self.hidden_size),
            Parameter(f"{prefix}position_bias", (compression.stride, columns), "bias"),
            self.norm.parameter(f"{prefix}kv_norm", width),
        ]

    def bind(self, site: Site) -> BoundCompressedAttention:
        """Join it to its weights, its planes and its share of the cells."""
        attn, weights = f"{site.prefix}self_attn.", site.weights
        (key,), entries = site.state.windows, site.state.planes
        states = shares(site.state.cells, self.state_sizes) if entries else []
        names = [f"{attn}compressor.", f"{attn}compressor.indexer."]
        poolings = tuple(
            BoundPooling(self._bind_pooling(weights, name, width), plane, state)
            for name, width, plane, state in zip(
                names, self.entry_widths, entries, states, strict=False
            )
        )
        first = [bind_linear(weights, f"{attn}{name}") for name in ("q_a_proj", "kv_proj")]
        for name, _ in zip(names, poolings, strict=False):
            first += [bind_linear(weights, f"{name}{part}") for part in ("kv_proj", "gate_proj")]
        second = [bind_linear(weights, f"{attn}q_b_proj")]
        if len(poolings) > 1:
            first.append(bind_linear(weights, f"{names[1]}scorer.weights_proj"))
            second.append(bind_linear(weights, f"{names[1]}q_b_proj"))
        norm = self.norm
        return BoundCompressedAttention(
            first=Projections(tuple(first), norm.bind(weights, f"{site.prefix}input_layernorm")),
            second=Projections(tuple(second), norm.bind(weights, f"{attn}q_a_norm")),
            q_norm=GroupNorm(self.head_dim, norm.eps),
            k_norm=GroupNorm(self.head_dim, norm.eps, weights.vector(f"{attn}kv_norm.weight")),
            layer=self._layer(weights.vector(f"{attn}sinks")),
            cache=SharedKeyCache(key, *entries[:1]),
            rope=self.rope,
            poolings=poolings,
            indexer=self._indexer(),
            groups=self.groups,
            o_a_proj=bind_linear(weights, f"{attn}o_a_proj"),
            o_b_proj=bind_linear(weights, f"{attn}o_b_proj"),
        )

    def _bind_pooling(self, weights: Weights, prefix: str, width: int) -> Pooling:
        assert self.compression is not None
        return Pooling(
            bias=weights.vector(f"{prefix}position_bias"),
            width=width,
            stride=self.compression.stride,
            overlap=self.compression.overlap,
            norm=self.norm.bind(weights, f"{prefix}kv_norm"),
            rotary_dim=self.rope.rotary_dim,
        )

    def _layer(self, sinks: Floats) -> SharedKeyAttention:
        compression = self.compression
        index = None if compression is None else compression.index
        return SharedKeyAttention(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rope.rotary_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            sinks=sinks,
            stride=0 if compression is None else compression.stride,
            top_k=None if index is None else index.top_k,
        )

    def _indexer(self) -> EntryIndexer | None:
        compression = self.compression
        if compression is None or compression.index is None:
            return None
        index = compression.index
        return EntryIndexer(
            num_heads=index.num_heads,
            head_dim=index.head_dim,
            rotary_dim=self.rope.rotary_dim,
            scale=(index.head_dim * index.num_heads) ** -0.5,
            stride=compression.stride,
            top_k=index.top_k,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundPooling:
    """A pooling, where its entries go, and where its sums lie."""

    layer: Pooling
    plane: KVPlane
    state: CellLayer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundCompressedAttention(BoundSublayer):
    """Such attention, ready to compute.

    Attributes:
        first: of the layer's input: query latent, key, then values and gates of each pooling, then
            the weights of index heads.
        second: of the query latent: q, and the indexer's.
    """

    first: Projections
    second: Projections
    q_norm: GroupNorm
    k_norm: GroupNorm
    layer: SharedKeyAttention
    cache: SharedKeyCache
    rope: Rope
    poolings: tuple[BoundPooling, ...]
    indexer: EntryIndexer | None
    groups: int
    o_a_proj: Matrix
    o_b_proj: Matrix

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        for rows, run in step.runs():
            self._run(run, x[rows], y[rows])

    def _run(self, step: Step, x: Floats, y: Floats) -> None:
        kernels, batch, rope = step.kernels, step.batch, step.rope(self.rope)
        low, key, *rest = kernels.project(self.first, x)
        q, *index_q = kernels.project(self.second, low)
        for number, pooling in enumerate(self.poolings):
            values, gates = rest[2 * number : 2 * number + 2]
            first = step.rope(self.rope, pooling.layer.stride - 1)
            kernels.pool_rows(
                pooling.layer, values, gates, batch, first, pooling.state, pooling.plane
            )
        selected = self._select(step, index_q, rest[-1:]) if self.indexer else None
        q, key = kernels.norm_rows(self.q_norm, q), kernels.norm_rows(self.k_norm, key)
        found = kernels.shared_key_attention(self.layer, q, key, batch, rope, self.cache, selected)
        low = kernels.matmul_groups(self.o_a_proj, self.groups, found)
        y += kernels.matmul(self.o_b_proj, low)

    def _select(self, step: Step, q: list[Floats], weights: list[Floats]) -> Ints | None:
        """The entries that each row sees, where some row does not see all."""
        indexer = self.indexer
        assert indexer is not None
        selected = step.selection(indexer.top_k, indexer.stride)
        if selected is not None:
            plane = self.poolings[1].plane
            rope = step.rope(self.rope)
            step.kernels.select_entries(
                indexer, q[0], weights[0], step.batch, rope, plane, selected
            )
        return selected
