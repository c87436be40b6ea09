"""What multi-head latent attention takes: its weights, its cache, and the keys that a row sees.

After DeepSeek-V2 (arXiv 2405.04434): keys and values of all heads are linear in one latent of each
position, so the cache holds the latent and one rotated key alone, and the matrix between is
absorbed into the query and the output. Sparse attention after DeepSeek-V3.2: an indexer of its own
small heads scores all earlier positions, and the best `top_k` are attended to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from colibri.formats import Floats

if TYPE_CHECKING:
    from colibri.kernels.api import Batch, CellLayer, Ints, KVPlane, Matrix, Norm, RopeTable
    from colibri.kernels.shared_key import Pooling


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """Scores of all earlier positions s, or entries: `sum_h w_h relu(q_h . k_s * scale)`.

    `q = q_proj l` with the layer's query latent l, `k = layer_norm(k_proj h)`, both rotated in
    their leading `rotary_dim`; `w = weights_proj h * weight_scale`. h is the layer's normed input.

    Attributes:
        k_norm: weight and eps of the layer norm of k.
        k_norm_bias: `[head_dim]`.
        pooling: makes keys of entries of k and of the gates `gate_proj h`; None without entries.
    """

    q_proj: Matrix
    k_proj: Matrix
    k_norm: Norm
    k_norm_bias: Floats
    weights_proj: Matrix
    num_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    weight_scale: float
    rope_pairing: Literal["half", "pair"] = "half"
    gate_proj: Matrix | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Multi-head latent attention with its input norm, always computed absorbed.

    `l = q_norm(q_a_proj h)`; `q = q_b_proj l`, for each head `[nope_dim | rope_dim]`. `[c | k] =
    kv_a_proj h`; `c = kv_norm(c)`. The rope parts of q and k are rotated (not where `rotary_dim` is
    0), and `c` and `k` rounded into the cache. `kv_b_proj` has for each head `nope_dim` rows `W_k`,
    then `value_dim` rows `W_v`: scores are `(q_nope^T W_k c + q_rope . k) * scale`, a head's output
    is `W_v sum p c`. Where a row has more than `top_k` keys it sees those that `indexer` chooses
    (ties go to the lower position), or without `indexer` those that are given. With a `pool` above
    1 these are entries of so many positions: a row sees all positions of the selected ones, and
    those that do not make up an entry yet.

    Attributes:
        q_a_proj: None where queries have no latent: then `q_norm` is None and l is h.
        kv_b_proj: f32, f16 or bf16.
    """

    norm: Norm
    q_a_proj: Matrix | None
    q_norm: Norm | None
    q_b_proj: Matrix
    kv_a_proj: Matrix
    kv_norm: Norm
    kv_b_proj: Matrix
    o_proj: Matrix
    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary_dim: int
    scale: float
    rope_pairing: Literal["half", "pair"] = "pair"
    top_k: int | None = None
    indexer: Indexer | None = None
    pool: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class LatentCache:
    """Where a layer keeps latents, rope keys and, with an indexer, index keys: one head each.

    Attributes:
        sums: of the entry that is not complete, where index keys are pooled.
    """

    latent: KVPlane
    rope_key: KVPlane
    index_key: KVPlane | None = None
    sums: CellLayer | None = None


@dataclass(frozen=True, slots=True)
class LatentLimits:
    """The largest latent attention of a model; part of `Limits`.

    Attributes:
        heads: 0 where no layer has it.
        head_dim: of a query, or of a value.
        key: latent and rope key together.
        index_positions: entries of the longest sequence that an indexer scores.
        index_per_block: entries of 64 positions, by which the number above is found.
    """

    heads: int = 0
    q_rank: int = 0
    head_dim: int = 0
    rank: int = 0
    key: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_positions: int = 0
    index_per_block: int = 0

    @classmethod
    def largest(cls, limits: Iterable[LatentLimits]) -> LatentLimits:
        """Each number's maximum."""
        rows = [astuple(each) for each in limits]
        return cls(*map(max, zip(*rows, strict=True))) if rows else cls()


NO_LATENTS = LatentLimits()


def entries_per_block(stride: int) -> int:
    """Entries of `stride` positions that 64 positions have, at least one."""
    return max(1, 64 // stride)


class LatentKernels(Protocol):
    """The part of `Kernels` that computes latent attention."""

    def latent_step(
        self,
        layer: LatentAttention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        cache: LatentCache,
        selected: Ints | None = None,
        y: Floats | None = None,
    ) -> None:
        """`y += o_proj(attention(norm(x)))`, what a position keeps being read from the cache alone.

        `selected [T, top_k]` holds the positions (or entries), ascending, of rows that have more
        than `top_k`: written where the layer has an indexer, else read. `y` None is `x` itself.
        """
