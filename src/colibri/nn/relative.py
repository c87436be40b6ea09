"""Grouped-query attention that knows order from learned biases of distances, not from rotation.

k and v pass short convolutions first. Inkling's; biases of a bounded extent, from a projection of
the row's own hidden state, resemble T5's (arXiv 1910.10683) made dependent on content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Ints, KVLayer, Matrix
from colibri.kernels.heads import Heads, RelativeBias
from colibri.kernels.recurrent_api import Projections, ShortConv, conv_state_nbytes
from colibri.kv import Plane, Ring, StateShape
from colibri.nn.attention import keys_and_values
from colibri.nn.cell import shares, shares_nbytes
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, bind_linear, linear
from colibri.nn.rope import Rope
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


class LogScaling(NamedTuple):
    """Scores grow with a row's position: times `1 + alpha ln(max((position + 1) / floor, 1))`."""

    alpha: float
    floor: int

    def temperature(self, positions: Ints) -> Floats:
        """The factor of each row, `[T]`, computed in float64 and rounded once."""
        grown = np.log(np.maximum((positions + 1) / self.floor, 1.0))
        return (1 + self.alpha * grown).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttention(Sublayer):
    """`b_ij = (r_proj h_i) . proj[:, i - j]` is added to the scores `q . k / head_dim`.

    q and k are normed head by head, hence the scale.

    Attributes:
        window: positions a token sees, itself included; None sees all.
        rank: numbers of r in each head.
        extent: distances that have a bias; others have none.
        kernel: taps of the convolutions of k and v.
        scaling: None where scores do not depend on the position alone.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: RMSNorm
    window: int | None
    rank: int
    extent: int
    kernel: int
    scaling: LogScaling | None = None

    @property
    def _rows(self) -> dict[str, int]:
        kv = self.num_kv_heads * self.head_dim
        heads = {"q_proj": self.num_heads * self.head_dim, "k_proj": kv, "v_proj": kv}
        return {**heads, "r_proj": self.num_heads * self.rank}

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the inputs that the convolutions of k and v keep."""
        return [conv_state_nbytes(self._rows["k_proj"], self.kernel)] * 2

    @property
    def state(self) -> StateShape:
        """K and V of each position that may still be seen, and the last inputs of both."""
        plane = Plane(self.num_kv_heads, self.head_dim, window=self.window)
        return StateShape((plane, plane), shares_nbytes(self.state_sizes))

    @property
    def demand(self) -> Demand:
        """Columns of q, k and v together; all products and what was found, as arrays."""
        rows = self._rows
        width = rows["q_proj"] + 2 * rows["k_proj"]
        arrays = width + rows["q_proj"] + rows["r_proj"] + self.hidden_size
        return Demand(attention_width=max(width, rows["r_proj"]), array_width=arrays)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norms, projections, convolutions, biases of distances."""
        attn = f"{prefix}self_attn."
        found = [self.norm.parameter(f"{prefix}input_layernorm", self.hidden_size)]
        for name, rows in self._rows.items():
            found += linear(attn + name, rows, self.hidden_size)
        for name in "kv":
            shape = (self._rows["k_proj"], 1, self.kernel)
            found.append(Parameter(f"{attn}{name}_sconv.conv1d.weight", shape, "filter"))
        return [
            *found,
            *linear(f"{attn}o_proj", self.hidden_size, self._rows["q_proj"]),
            self.norm.parameter(f"{attn}q_norm", self.head_dim),
            self.norm.parameter(f"{attn}k_norm", self.head_dim),
            Parameter(f"{attn}rel_logits_proj.proj", (self.rank, self.extent), "bias"),
        ]

    def bind(self, site: Site) -> BoundRelativeAttention:
        """Join it to its weights, its share of the K/V pool and of the cells."""
        attn, weights = f"{site.prefix}self_attn.", site.weights
        matrices = tuple(bind_linear(weights, attn + name) for name in self._rows)
        convs = tuple(
            ShortConv(
                weights.vector(f"{attn}{name}_sconv.conv1d.weight").reshape(-1, self.kernel),
                residual=True,
            )
            for name in "kv"
        )
        biases = weights.vector(f"{attn}rel_logits_proj.proj").reshape(self.rank, self.extent)
        heads = Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=1 / self.head_dim,
            rotary_dim=0,
            q_norm=self.norm.bind(weights, f"{attn}q_norm"),
            k_norm=self.norm.bind(weights, f"{attn}k_norm"),
            window=self.window,
            relative=RelativeBias(biases),
        )
        return BoundRelativeAttention(
            Projections(matrices, self.norm.bind(weights, f"{site.prefix}input_layernorm")),
            convs,
            tuple(shares(site.state.cells, self.state_sizes)),
            heads,
            keys_and_values(site.state),
            bind_linear(weights, f"{attn}o_proj"),
            self.scaling,
            site.state.ring,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundRelativeAttention(BoundSublayer):
    """Attention with relative biases, ready to compute."""

    projections: Projections
    convs: tuple[ShortConv, ...]
    kept: tuple[CellLayer, ...]
    heads: Heads
    kv: KVLayer
    o_proj: Matrix
    scaling: LogScaling | None
    ring: Ring | None = None

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        kernels, batch = step.kernels, step.batch
        q, k, v, relative = kernels.project(self.projections, x)
        for conv, each, kept in zip(self.convs, (k, v), self.kept, strict=True):
            kernels.short_conv(conv, each, batch, kept)
        for rows, together in step.turns(self.ring):
            chosen = slice(None) if rows is None else rows
            found = kernels.attend(
                self.heads,
                q[chosen],
                k[chosen],
                v[chosen],
                together,
                Rope.rows(step.no_rope(), chosen),
                self.kv,
                relative=relative[chosen],
                temperature=self._temperature(together),
            )
            y[chosen] += kernels.matmul(self.o_proj, found)

    def _temperature(self, batch: Batch) -> Floats | None:
        return None if self.scaling is None else self.scaling.temperature(batch.positions)
