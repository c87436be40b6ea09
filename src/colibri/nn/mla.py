"""Multi-head latent attention: its parameters, and how they become the kernels'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from colibri.formats import Floats
from colibri.kernels.latent import (
    Indexer,
    LatentAttention,
    LatentCache,
    LatentLimits,
    entries_per_block,
)
from colibri.kernels.shared_key import Pooling, pooling_state_nbytes
from colibri.kv import Plane, StateShape
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.rope import Rope
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer

_LATENT_NORM = RMSNorm(1e-6)  # whatever rms_norm_eps says, in all but a few families
_INDEX_EPS = 1e-6


class LatentConfig(Protocol):
    """The config keys that latent attention reads."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def num_attention_heads(self) -> int:
        """H."""

    @property
    def q_lora_rank(self) -> int | None:
        """Width of the query latent; None projects queries in one step."""

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent that is cached."""

    @property
    def qk_nope_head_dim(self) -> int:
        """What a head of q and k does not rotate."""

    @property
    def qk_rope_head_dim(self) -> int:
        """What it does; one such key serves all heads."""

    @property
    def v_head_dim(self) -> int:
        """Width of a head's value."""

    @property
    def attention_bias(self) -> bool:
        """Whether all projections of the hidden state, and the last, have biases."""

    @property
    def norm(self) -> RMSNorm:
        """The norm before the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndex:
    """How keys are selected: the lightning indexer of DeepSeek sparse attention.

    Attributes:
        num_heads: of the indexer's queries, which share one key.
        head_dim: width of that key, which is cached.
        top_k: keys that a row attends to at most, or entries.
        pairing: of the rotated dims, which come first in a head.
        shared: whether the layer has no indexer and takes the selection of the layer before.
        pool: positions of one entry, which are selected together by a pooled key; 1 without.
    """

    num_heads: int
    head_dim: int
    top_k: int
    pairing: Literal["half", "pair"]
    shared: bool = False
    pool: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHeadLatentAttention(Sublayer):
    """Norm, low-rank q and k/v, rope on a part of each head, softmax attention, output projection.

    Attributes:
        rope: None rotates nothing.
        latent_norm: of the query latent and of the cached one.
        index: None attends to all keys.
        bias: of the projections from the hidden state and of the last one.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: RMSNorm
    rope: Rope | None
    latent_norm: RMSNorm = _LATENT_NORM
    index: SparseIndex | None = None
    bias: bool = False

    @classmethod
    def from_config(
        cls,
        cfg: LatentConfig,
        rope: Rope | None,
        *,
        index: SparseIndex | None = None,
        latent_norm: RMSNorm = _LATENT_NORM,
    ) -> MultiHeadLatentAttention:
        """Sizes from the config; what is peculiar to a family by keyword."""
        return cls(
            hidden_size=cfg.hidden_size,
            num_heads=cfg.num_attention_heads,
            q_rank=cfg.q_lora_rank,
            rank=cfg.kv_lora_rank,
            nope_dim=cfg.qk_nope_head_dim,
            rope_dim=cfg.qk_rope_head_dim,
            value_dim=cfg.v_head_dim,
            norm=cfg.norm,
            rope=rope,
            latent_norm=latent_norm,
            index=index,
            bias=cfg.attention_bias,
        )

    @property
    def state(self) -> StateShape:
        """The latent and the rope key of each position, and the index key where there is one."""
        planes = (Plane(1, self.rank), Plane(1, self.rope_dim))
        if self.index is None or self.index.shared:
            return StateShape(planes)
        width, pool = self.index.head_dim, self.index.pool
        cell = pooling_state_nbytes(width, overlap=False) if pool > 1 else 0
        return StateShape((*planes, Plane(1, width, pool)), cell)

    @property
    def demand(self) -> Demand:
        """Sizes of a head and of the indexer."""
        index = None if self.index is None or self.index.shared else self.index
        limits = LatentLimits(
            heads=self.num_heads,
            q_rank=self.q_rank or 0,
            head_dim=max(self.nope_dim + self.rope_dim, self.value_dim),
            rank=self.rank,
            key=self.rank + self.rope_dim,
            index_heads=index.num_heads if index else 0,
            index_dim=index.head_dim if index else 0,
            index_per_block=entries_per_block(index.pool) if index else 0,
        )
        return Demand(latent=limits, array_width=0 if self.index is None else self.index.top_k)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norms, projections, and the indexer's."""
        attn, hidden, heads = f"{prefix}self_attn.", self.hidden_size, self.num_heads
        q_width = heads * (self.nope_dim + self.rope_dim)
        found = [self.norm.parameter(f"{prefix}input_layernorm", hidden)]
        if self.q_rank is None:
            found += linear(f"{attn}q_proj", q_width, hidden)
        else:
            found += linear(f"{attn}q_a_proj", self.q_rank, hidden, bias=self.bias)
            found.append(self.latent_norm.parameter(f"{attn}q_a_layernorm", self.q_rank))
            found += linear(f"{attn}q_b_proj", q_width, self.q_rank)
        name = f"{attn}kv_a_proj_with_mqa"
        found += linear(name, self.rank + self.rope_dim, hidden, bias=self.bias)
        found.append(self.latent_norm.parameter(f"{attn}kv_a_layernorm", self.rank))
        shape = (heads * (self.nope_dim + self.value_dim), self.rank)
        found.append(Parameter(f"{attn}kv_b_proj.weight", shape, "absorbed"))
        found += linear(f"{attn}o_proj", hidden, heads * self.value_dim, bias=self.bias)
        if self.index is not None and not self.index.shared:
            found += self._index_parameters(self.index, f"{attn}indexer.")
        return found

    def _index_parameters(self, index: SparseIndex, prefix: str) -> list[Parameter]:
        low = self.hidden_size if self.q_rank is None else self.q_rank
        weights = (index.num_heads, self.hidden_size)
        gate, ape = (index.head_dim, self.hidden_size), (index.pool, index.head_dim)
        pooled = [
            Parameter(f"{prefix}index_kpool_compress_gate", gate, "matrix"),
            Parameter(f"{prefix}index_kpool_compress_ape", ape, "bias"),
        ]
        return [
            *linear(f"{prefix}wq_b", index.num_heads * index.head_dim, low),
            *linear(f"{prefix}wk", index.head_dim, self.hidden_size),
            Parameter(f"{prefix}k_norm.weight", (index.head_dim,), "norm"),
            Parameter(f"{prefix}k_norm.bias", (index.head_dim,), "bias"),
            Parameter(f"{prefix}weights_proj.weight", weights, "router"),
            *(pooled if index.pool > 1 else ()),
        ]

    def bind(self, site: Site) -> BoundLatentAttention:
        """Join it to its weights and its planes of the pool."""
        attn, weights = f"{site.prefix}self_attn.", site.weights
        rotary_dim = 0 if self.rope is None else self.rope.rotary_dim
        low_rank = self.q_rank is not None
        scale = 1.0 if self.rope is None else self.rope.score_factor
        layer = LatentAttention(
            norm=self.norm.bind(weights, f"{site.prefix}input_layernorm"),
            q_a_proj=bind_linear(weights, f"{attn}q_a_proj", bias=self.bias) if low_rank else None,
            q_norm=self.latent_norm.bind(weights, f"{attn}q_a_layernorm") if low_rank else None,
            q_b_proj=bind_linear(weights, f"{attn}{'q_b_proj' if low_rank else 'q_proj'}"),
            kv_a_proj=bind_linear(weights, f"{attn}kv_a_proj_with_mqa", bias=self.bias),
            kv_norm=self.latent_norm.bind(weights, f"{attn}kv_a_layernorm"),
            kv_b_proj=bind_linear(weights, f"{attn}kv_b_proj"),
            o_proj=bind_linear(weights, f"{attn}o_proj", bias=self.bias),
            num_heads=self.num_heads,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            rotary_dim=rotary_dim,
            scale=scale * (self.nope_dim + self.rope_dim) ** -0.5,
            rope_pairing="pair" if self.rope is None else self.rope.pairing,
            top_k=None if self.index is None else self.index.top_k,
            indexer=self._bind_index(weights, f"{attn}indexer.", rotary_dim),
            pool=1 if self.index is None else self.index.pool,
        )
        latent, rope_key, *index_key = site.state.planes
        cache = LatentCache(latent, rope_key, next(iter(index_key), None), site.state.cells)
        return BoundLatentAttention(layer, self.rope, cache)

    def _bind_index(self, weights: Weights, prefix: str, rotary_dim: int) -> Indexer | None:
        index = self.index
        if index is None or index.shared:
            return None
        pooled, bias = index.pool > 1, f"{prefix}index_kpool_compress_ape"
        return Indexer(
            q_proj=bind_linear(weights, f"{prefix}wq_b"),
            k_proj=bind_linear(weights, f"{prefix}wk"),
            k_norm=RMSNorm(_INDEX_EPS).bind(weights, f"{prefix}k_norm"),
            k_norm_bias=weights.vector(f"{prefix}k_norm.bias"),
            weights_proj=bind_linear(weights, f"{prefix}weights_proj"),
            num_heads=index.num_heads,
            head_dim=index.head_dim,
            rotary_dim=rotary_dim,
            scale=index.head_dim**-0.5,
            weight_scale=index.num_heads**-0.5,
            rope_pairing=index.pairing,
            gate_proj=weights.matrix(f"{prefix}index_kpool_compress_gate") if pooled else None,
            pooling=Pooling(weights.vector(bias), index.head_dim, index.pool) if pooled else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundLatentAttention(BoundSublayer):
    """Latent attention, ready to compute."""

    layer: LatentAttention
    rope: Rope | None
    cache: LatentCache

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        layer, top_k = self.layer, self.layer.top_k
        rope = step.no_rope() if self.rope is None else step.rope(self.rope)
        selected = None if top_k is None else step.selection(top_k, layer.pool)
        step.kernels.latent_step(layer, x, step.batch, rope, self.cache, selected, y)
