"""Grouped-query attention: its parameters, and how they become the kernels' `Attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from colibri.kernels.api import Attention, Norm
from colibri.kv import KVShape
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.rope import Rope


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
    def rms_norm_eps(self) -> float:
        """Of every RMS norm."""

    @property
    def rope(self) -> Rope:
        """Rotary embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Norm, q/k/v, optional q/k norm and clip, rope, causal softmax attention, output projection.

    Attributes:
        qk_norm: RMS norm of q and k over each `head`, over the whole `projection`, or None.
        clip: bound of |q|, |k| and |v| before rope.
        window: positions a token sees, itself included; None sees all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    clip: float | None = None
    window: int | None = None

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
    ) -> GroupedQueryAttention:
        """Sizes, eps and rope from the config; what is peculiar to a family by keyword."""
        return cls(
            hidden_size=cfg.hidden_size,
            num_heads=cfg.num_attention_heads,
            num_kv_heads=cfg.kv_heads,
            head_dim=cfg.head_width,
            eps=cfg.rms_norm_eps,
            rope=cfg.rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            clip=clip,
            window=window,
        )

    @property
    def kv_shape(self) -> KVShape:
        """What one layer keeps of a token."""
        return KVShape(self.num_kv_heads, self.head_dim)

    @property
    def width(self) -> int:
        """Columns of q, k and v together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def parameters(self, prefix: str) -> list[Parameter]:
        """Tensors under `prefix`, which ends with the layer's dot."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = f"{prefix}self_attn."
        found = [Parameter(f"{prefix}input_layernorm.weight", (self.hidden_size,), "norm")]
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            found += linear(attn + name, rows, self.hidden_size, bias=self.qkv_bias)
        found += linear(f"{attn}o_proj", self.hidden_size, q, bias=self.o_bias)
        if self.qk_norm:
            per_head = self.qk_norm == "head"
            found.append(
                Parameter(f"{attn}q_norm.weight", (self.head_dim if per_head else q,), "norm")
            )
            found.append(
                Parameter(f"{attn}k_norm.weight", (self.head_dim if per_head else kv,), "norm")
            )
        return found

    def bind(self, weights: Weights, prefix: str) -> Attention:
        """The kernels' view of this layer."""
        attn = f"{prefix}self_attn."
        return Attention(
            norm=self._norm(weights, f"{prefix}input_layernorm.weight"),
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
            q_norm=self._norm(weights, f"{attn}q_norm.weight") if self.qk_norm else None,
            k_norm=self._norm(weights, f"{attn}k_norm.weight") if self.qk_norm else None,
            clip=self.clip,
            window=self.window,
        )

    def _norm(self, weights: Weights, name: str) -> Norm:
        return Norm(weights.vector(name), self.eps)
