"""Several residual streams instead of one, mixed before and behind each sublayer.

Hyper-connections (arXiv 2409.19606) whose mixing matrix is made doubly stochastic, after DeepSeek's
manifold-constrained ones: a sublayer reads one weighted sum of the streams, and what it adds goes
to each of them by a weight of its own, while the streams themselves are mixed. All weights depend
on the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from colibri.formats import Floats

if TYPE_CHECKING:
    from colibri.kernels.api import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class StreamMix:
    """How n streams are read and written; x `[n D]` is a row with all of them.

    `f = fn x / sqrt(mean(x^2) + norm_eps)`, in three parts: of n `pre = sigmoid(f scale_0 + base) +
    eps`, of n `post = 2 sigmoid(f scale_1 + base)`, of n x n a softmax of each row of `f scale_2 +
    base`, plus eps. Its columns are divided by their sum + eps, then `iterations - 1` times its
    rows and its columns: the mixing matrix M (Sinkhorn and Knopp). What is read is `sum_i pre_i
    x_i`; writing y leaves `x_j = post_j y + sum_i M_ij x_i`.

    Attributes:
        fn: `[2 n + n^2, n D]`; or `[n, n D]` where the streams are only read (a head).
        base: one number a row of `fn`.
        scale: `[3]`, or `[1]`.
    """

    fn: Matrix
    base: Floats
    scale: Floats
    num_streams: int
    norm_eps: float
    eps: float
    iterations: int

    @property
    def reads_only(self) -> bool:
        """Whether there is nothing but `pre`."""
        return self.fn.rows == self.num_streams


def stream_weights(num_streams: int) -> int:
    """Weights of one row: pre, post and the mixing matrix."""
    return num_streams * (num_streams + 2)


class StreamKernels(Protocol):
    """Reading and writing of streams, part of `Kernels`."""

    def read_streams(self, mix: StreamMix, x: Floats) -> tuple[Floats, Floats]:
        """What is read of `x [T, n D]`: `[T, D]`; and pre, post and M of each row, `[T, W]`."""

    def write_streams(self, mix: StreamMix, weights: Floats, y: Floats, x: Floats) -> None:
        """Write `y [T, D]` into the streams `x [T, n D]`, by the weights of the reading before."""
