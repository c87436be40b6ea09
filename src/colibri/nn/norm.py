"""RMS norms: how a family's weights of them are stored."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.kernels.api import Norm
from colibri.nn.parameter import Parameter, Weights


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * w`.

    Attributes:
        centred: whether checkpoints store `w - 1`.
    """

    eps: float
    centred: bool = False

    def parameter(self, name: str, width: int) -> Parameter:
        """The weights `[width]`; `name` without `.weight`."""
        return Parameter(f"{name}.weight", (width,), "centred_norm" if self.centred else "norm")

    def bind(self, weights: Weights, name: str) -> Norm:
        """The kernels' view of it."""
        return Norm(weights.vector(f"{name}.weight"), self.eps)
