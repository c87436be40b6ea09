"""Grouped-query attention: its parameters, and how they become the kernels' `Attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from colibri.formats import Floats
from colibri.kernels.api import Attention, KVLayer
from colibri.kv import LayerState, Ring, StateShape
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, bind_linear, linear
from colibri.nn.rope import Rope
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


class AttentionConfig(Protocol):
    """The config keys that grouped-query attention reads."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def num_attention_heads(self) -> int:
        """H."""

    @property
    def kv_heads(self) -> int:
        """K."""

    @property
    def head_width(self) -> int:
        """Width of one head."""

    @property
    def norm(self) -> RMSNorm:
        """Every norm of the model."""

    @property
    def rope(self) -> Rope:
        """Rotary embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention(Sublayer):
    """Norm, q/k/v, optional q/k norm and clip, rope, causal softmax attention, output projection.

    Attributes:
        qk_norm: RMS norm of q and k over each `head`, over the whole `projection`, or None.
        clip: bound of |q|, |k| and |v| before rope.
        window: positions a token sees, itself included; None sees all.
        gated: whether `q_proj` gives each head a gate behind its q, whose sigmoid multiplies what
            the head found.
        sinks: whether each head has a learned score without a value in its softmax.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: RMSNorm
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    clip: float | None = None
    window: int | None = None
    gated: bool = False
    sinks: bool = False

    @classmethod
    def from_config(
        cls,
        cfg: AttentionConfig,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: Literal["head", "projection"] | None = None,
        clip: float | None = None,
        window: int | None = None,
        gated: bool = False,
        sinks: bool = False,
    ) -> GroupedQueryAttention:
        """Sizes, eps and rope from the config; what is peculiar to a family by keyword."""
        return cls(
            hidden_size=cfg.hidden_size,
            num_heads=cfg.num_attention_heads,
            num_kv_heads=cfg.kv_heads,
            head_dim=cfg.head_width,
            norm=cfg.norm,
            rope=cfg.rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            clip=clip,
            window=window,
            gated=gated,
            sinks=sinks,
        )

    @property
    def state(self) -> StateShape:
        """K and V of each position that may still be seen."""
        return StateShape.keys_and_values(self.num_kv_heads, self.head_dim, self.window)

    @property
    def demand(self) -> Demand:
        """Columns of q, k and v together, and of q with its gates."""
        heads = (3 if self.gated else 1) * self.num_heads + 2 * self.num_kv_heads
        return Demand(attention_width=heads * self.head_dim)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norm, projections, norms of q and k."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = f"{prefix}self_attn."
        found = [self.norm.parameter(f"{prefix}input_layernorm", self.hidden_size)]
        for name, rows in (("q_proj", 2 * q if self.gated else q), ("k_proj", kv), ("v_proj", kv)):
            found += linear(attn + name, rows, self.hidden_size, bias=self.qkv_bias)
        found += linear(f"{attn}o_proj", self.hidden_size, q, bias=self.o_bias)
        if self.qk_norm:
            per_head = self.qk_norm == "head"
            found.append(self.norm.parameter(f"{attn}q_norm", self.head_dim if per_head else q))
            found.append(self.norm.parameter(f"{attn}k_norm", self.head_dim if per_head else kv))
        if self.sinks:
            found.append(Parameter(f"{attn}sinks", (self.num_heads,), "bias"))
        return found

    def bind(self, site: Site) -> BoundAttention:
        """Join it to its weights and its share of the K/V pool."""
        attn, weights = f"{site.prefix}self_attn.", site.weights
        layer = Attention(
            norm=self.norm.bind(weights, f"{site.prefix}input_layernorm"),
            q_proj=bind_linear(weights, f"{attn}q_proj", bias=self.qkv_bias),
            k_proj=bind_linear(weights, f"{attn}k_proj", bias=self.qkv_bias),
            v_proj=bind_linear(weights, f"{attn}v_proj", bias=self.qkv_bias),
            o_proj=bind_linear(weights, f"{attn}o_proj", bias=self.o_bias),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rotary_dim=self.rope.rotary_dim,
            rope_pairing=self.rope.pairing,
            q_norm=self.norm.bind(weights, f"{attn}q_norm") if self.qk_norm else None,
            k_norm=self.norm.bind(weights, f"{attn}k_norm") if self.qk_norm else None,
            clip=self.clip,
            window=self.window,
            gated=self.gated,
            sinks=weights.vector(f"{attn}sinks") if self.sinks else None,
        )
        return BoundAttention(layer, self.rope, keys_and_values(site.state), site.state.ring)


@dataclass(frozen=True, slots=True, eq=False)
class BoundAttention(BoundSublayer):
    """Grouped-query attention, ready to compute."""

    layer: Attention
    rope: Rope
    kv: KVLayer
    ring: Ring | None = None

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        attend, rope = step.kernels.attention_step, step.rope(self.rope)
        for rows, batch in step.turns(self.ring):
            if rows is None:
                attend(self.layer, x, batch, rope, self.kv, y)
            else:
                part = y[rows]
                attend(self.layer, x[rows], batch, Rope.rows(rope, rows), self.kv, part)
                y[rows] = part


def keys_and_values(state: LayerState) -> KVLayer:
    """The planes of K and V, which follow each other, as the kernels see them."""
    keys, _ = state.planes
    return KVLayer(keys.pool, keys.format, keys.block_nbytes, keys.offset, keys.heads, keys.width)
