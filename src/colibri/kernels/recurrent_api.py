"""Row operations and recurrences: what mixers beside softmax attention are composed of.

Operands are float32 rows `[T, W]`, any range of columns of a wider array among them; results are
dense. A row operation reads that row alone. A recurrence reads and writes the state of the row's
sequence, a cell of fixed size: rows of one sequence come in the order of their positions, others
may stand between them, and how many rows a call has changes no bit. A cell of zeros is the state
before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from colibri.formats import Floats

if TYPE_CHECKING:
    from colibri.kernels.api import Batch, CellLayer, Matrix, Norm

Activation: TypeAlias = Literal["sigmoid", "silu", "softplus", "exp"]


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """Matrices over one input, which `norm` makes of the rows where it is given."""

    matrices: tuple[Matrix, ...]
    norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupNorm:
    """`x / sqrt(mean(x^2) + eps) * weight * act(gate)` of every `width` neighbours.

    Attributes:
        weight: `[width]`, or one for each number of a row, or None.
        of_sum: divide by `sqrt(sum(x^2) + eps)` instead (l2 norm).
        gate: what is made of the gate, an operand of x's shape; None without one.
    """

    width: int
    eps: float
    weight: Floats | None = None
    of_sum: bool = False
    gate: Literal["sigmoid", "silu"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecayGate:
    """Decay factors `e^g` of heads, or of their channels.

    `g = -exp(a_log) * softplus(a + bias)` (gated delta nets, KDA), or with a negative `lower_bound`
    `g = lower_bound * sigmoid(exp(a_log) * (a + bias))` (the safe gate of later KDA).

    Attributes:
        a_log: `[H]`, or longer, of which the first H count.
        bias: `[H * width]`.
        num_heads: H.
    """

    a_log: Floats
    bias: Floats
    num_heads: int
    lower_bound: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """A causal convolution of each channel.

    `sum_i weight[c, i] x[t - (kernel - 1 - i) dilation, c] + bias`. `silu` is applied to the sum;
    with `residual` the input is added to what came out. The state is the last `(kernel - 1)
    dilation` inputs, `[.., C]`, the oldest first.

    Attributes:
        weight: `[C, kernel]`, the newest input's last.
        bias: `[C]`, or None.
    """

    weight: Floats
    bias: Floats | None = None
    silu: bool = False
    residual: bool = False
    dilation: int = 1

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's state."""
        channels, kernel = self.weight.shape
        return conv_state_nbytes(channels, kernel, self.dilation)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule, token by token, with a state S `[key_dim, value_dim]` a head.

    `q, k` are divided by `sqrt(sum of squares + eps)`, `q` then multiplied by `scale`; value head
    h reads key head `h // (num_heads / num_key_heads)`. Then `S = decay S; S += k (beta (v - k S));
    out = q S`, where decay is one factor a `head` or one a key `channel` (Gated DeltaNet, arXiv
    2412.06464; Kimi Linear, arXiv 2510.26692).
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    scale: float
    decay: Literal["head", "channel"] = "head"
    eps: float = 1e-6

    @property
    def decay_width(self) -> int:
        """Decay factors of a head."""
        return 1 if self.decay == "head" else self.key_dim

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's state `[H, key_dim, value_dim]`."""
        return 4 * self.num_heads * self.key_dim * self.value_dim


def conv_state_nbytes(channels: int, kernel: int, dilation: int = 1) -> int:
    """Bytes of the inputs that a short convolution keeps of one sequence."""
    return 4 * (kernel - 1) * dilation * channels


class RowKernels(Protocol):
    """Operations on rows, part of `Kernels`."""

    def project(self, layer: Projections, x: Floats) -> tuple[Floats, ...]:
        """`matrix(norm(x))` of each matrix: `[T, K] -> [T, N]`."""

    def norm_rows(self, norm: GroupNorm, x: Floats, gate: Floats | None = None) -> Floats:
        """The norm of `x [T, n * width]`, times the gate `[T, n * width]`."""

    def activate(self, activation: Activation, x: Floats) -> Floats:
        """`activation(x)` of every element of `x [T, W]`."""

    def decay(self, gate: DecayGate, a: Floats) -> Floats:
        """`e^g` of `a [T, H * width]`."""


class RecurrentKernels(Protocol):
    """Recurrences, part of `Kernels`."""

    def short_conv(self, layer: ShortConv, x: Floats, batch: Batch, state: CellLayer) -> None:
        """Replace `x [T, C]` by the convolution of its sequence; the cell keeps the last."""

    def delta_rule(
        self,
        layer: DeltaRule,
        q: Floats,
        k: Floats,
        v: Floats,
        decay: Floats,
        beta: Floats,
        batch: Batch,
        state: CellLayer,
    ) -> Floats:
        """Carry the states over the rows; `[T, H * value_dim]`.

        `q, k [T, num_key_heads * key_dim]`, `v [T, H * value_dim]`, `decay [T, H * decay_width]`,
        `beta [T, H]`.
        """
