"""The gated feed-forward network of dense layers and shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import FFN, PLAIN, Norm, Swiglu
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


class FFNConfig(Protocol):
    """The config keys that a dense feed-forward reads."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def intermediate_size(self) -> int:
        """F."""

    @property
    def norm(self) -> RMSNorm:
        """Every norm of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFFN(Sublayer):
    """`x += down(silu(gate h) * (up h))`, `h = norm(x)`: a whole dense layer.

    Attributes:
        intermediate_size: width F of gate and up.
        learned_factor: whether a learned number, `global_scale`, multiplies what is added.
        swiglu: the activation.
    """

    hidden_size: int
    intermediate_size: int
    norm: RMSNorm
    bias: bool = False
    learned_factor: bool = False
    swiglu: Swiglu = PLAIN

    @classmethod
    def from_config(cls, cfg: FFNConfig, *, bias: bool = False, swiglu: Swiglu = PLAIN) -> DenseFFN:
        """Sizes and norm from the config; what is peculiar to a family by keyword."""
        return cls(
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            norm=cfg.norm,
            bias=bias,
            swiglu=swiglu,
        )

    @property
    def demand(self) -> Demand:
        """Its width."""
        return Demand(intermediate_size=self.intermediate_size)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norm, gate, up and down."""
        norm = self.norm.parameter(f"{prefix}post_attention_layernorm", self.hidden_size)
        glu = glu_parameters(
            f"{prefix}mlp.", self.hidden_size, self.intermediate_size, bias=self.bias
        )
        scale = Parameter(f"{prefix}mlp.global_scale", (1,), "norm")
        return [norm, *glu, scale] if self.learned_factor else [norm, *glu]

    def bind(self, site: Site) -> BoundFFN:
        """Join it to its weights."""
        norm = self.norm.bind(site.weights, f"{site.prefix}post_attention_layernorm")
        layer = bind_glu(
            site.weights, f"{site.prefix}mlp.", norm, bias=self.bias, swiglu=self.swiglu
        )
        if not self.learned_factor:
            return BoundFFN(layer)
        return BoundFFN(layer, site.weights.vector(f"{site.prefix}mlp.global_scale"))


@dataclass(frozen=True, slots=True, eq=False)
class BoundFFN(BoundSublayer):
    """A dense feed-forward, ready to compute.

    Attributes:
        factor: `[1]`, or None.
    """

    layer: FFN
    factor: Floats | None = None

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        if self.factor is None:
            step.kernels.ffn_step(self.layer, x, y)
            return
        out = np.zeros_like(x)
        step.kernels.ffn_step(self.layer, x, out)
        y += self.factor * out


def glu_parameters(
    prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool = False
) -> list[Parameter]:
    """gate, up and down under `prefix`."""
    return [
        *linear(f"{prefix}gate_proj", intermediate_size, hidden_size, bias=bias),
        *linear(f"{prefix}up_proj", intermediate_size, hidden_size, bias=bias),
        *linear(f"{prefix}down_proj", hidden_size, intermediate_size, bias=bias),
    ]


def bind_glu(
    weights: Weights,
    prefix: str,
    norm: Norm | None = None,
    *,
    bias: bool = False,
    swiglu: Swiglu = PLAIN,
) -> FFN:
    """gate, up and down under `prefix` as the kernels' `FFN`."""
    gate, up, down = (
        bind_linear(weights, prefix + name, bias=bias)
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return FFN(gate, up, down, norm, swiglu=swiglu)
