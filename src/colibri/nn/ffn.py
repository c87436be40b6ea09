"""The gated feed-forward network of dense layers and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.kernels.api import FFN, Norm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFFN:
    """`x += down(silu(gate h) * (up h))`, `h = norm(x)`: a whole dense layer.

    Attributes:
        intermediate_size: width F of gate and up.
    """

    hidden_size: int
    intermediate_size: int
    eps: float

    def parameters(self, prefix: str) -> list[Parameter]:
        """Tensors under `prefix`, which ends with the layer's dot."""
        norm = Parameter(f"{prefix}post_attention_layernorm.weight", (self.hidden_size,), "norm")
        return [norm, *glu_parameters(f"{prefix}mlp.", self.hidden_size, self.intermediate_size)]

    def bind(self, weights: Weights, prefix: str) -> FFN:
        """The kernels' view of this layer."""
        norm = Norm(weights.vector(f"{prefix}post_attention_layernorm.weight"), self.eps)
        return bind_glu(weights, f"{prefix}mlp.", norm)


def glu_parameters(prefix: str, hidden_size: int, intermediate_size: int) -> list[Parameter]:
    """gate, up and down under `prefix`."""
    return [
        *linear(f"{prefix}gate_proj", intermediate_size, hidden_size),
        *linear(f"{prefix}up_proj", intermediate_size, hidden_size),
        *linear(f"{prefix}down_proj", hidden_size, intermediate_size),
    ]


def bind_glu(weights: Weights, prefix: str, norm: Norm | None = None) -> FFN:
    """gate, up and down under `prefix` as the kernels' `FFN`."""
    gate, up, down = (
        bind_linear(weights, prefix + name) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return FFN(gate, up, down, norm)
