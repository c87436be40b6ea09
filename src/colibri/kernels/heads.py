"""Softmax attention of heads that are projected already: what lies between the projections.

`attention_step` projects, attends and projects again in one call; layers that do more with q, k or
v, or with what was found, compose `project`, `attend` and `matmul` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from colibri.formats import Floats

if TYPE_CHECKING:
    from colibri.kernels.api import Batch, Ints, KVLayer, Norm, RopeTable


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """A learned bias of each distance, `r . weight[:, i - j]` for key j of row i; none beyond.

    r is an operand of each row and head.

    Attributes:
        weight: `[rank, extent]`.
    """

    weight: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Heads:
    """Grouped-query attention between its projections; head h reads K/V head `h // (H / K)`.

    Order of work on q and k: norm, clip, rope. `q_norm` and `k_norm` weigh one head (`[head_dim]`)
    or the whole projection (`[H * head_dim]`); the shape says which. `rotary_dim` leading dims of a
    head are rotated, paired `i, i + rotary_dim/2` ("half") or `2i, 2i + 1` ("pair"). A `window` W
    lets position i see `i - W < j <= i`. `sinks [H]` are scores without a value: they only take
    part in the softmax of their head. Where it is `gated`, q has for each head its q, then a gate
    of the same width, and what was found is multiplied by the gate's sigmoid. `relative` is added
    to scaled scores.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    rope_pairing: Literal["half", "pair"] = "half"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    clip: float | None = None
    window: int | None = None
    sinks: Floats | None = None
    gated: bool = False
    relative: RelativeBias | None = None


class HeadKernels(Protocol):
    """The part of `Kernels` that attends."""

    def attend(
        self,
        layer: Heads,
        q: Floats,
        k: Floats,
        v: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        *,
        relative: Floats | None = None,
        temperature: Floats | None = None,
        selected: Ints | None = None,
    ) -> Floats:
        """What each head finds, `[T, H * head_dim]`; K and V are rounded into the pool first.

        `q [T, H * head_dim]` (gated: twice as wide), `k, v [T, K * head_dim]` are as projected, and
        may be overwritten. `relative [T, H * rank]` is what the biases are made of; `temperature
        [T]` multiplies a row's scores, biases included. `selected [T, S]` are the positions that a
        row sees, ascending, then -1; without it a row sees all that its window lets it.
        """
