"""Grouped-query attention to the blocks of positions that an indexer finds best.

Qwen3.8-Flash-Next's: index keys of `ratio` positions are averaged, normed and rotated as one; heads
of their own score these entries, and a row attends to the positions of the best, and to those that
follow the last complete entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Floats
from colibri.kernels.api import CellLayer, Ints, KVLayer, KVPlane, Matrix, Norm
from colibri.kernels.heads import Heads
from colibri.kernels.latent import LatentLimits, entries_per_block
from colibri.kernels.recurrent_api import GroupNorm, Projections
from colibri.kernels.shared_key import EntryIndexer, Pooling, pooling_state_nbytes
from colibri.kv import LayerState, Plane, StateShape
from colibri.nn.attention import keys_and_values
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.rope import Rope
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndex:
    """How blocks are selected.

    Attributes:
        num_heads: of index queries; there is one head of keys.
        budget: positions of selected blocks, a multiple of `ratio`.
        ratio: positions of a block.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int

    @property
    def top_k(self) -> int:
        """Blocks that a row sees."""
        return self.budget // self.ratio

    @property
    def rows(self) -> int:
        """Of the projection of queries and key."""
        return (self.num_heads + 1) * self.head_dim

    def order(self, rotary_dim: int) -> NDArray[np.int64]:
        """Where each number of a head is taken from.

        Entries are rotated in pairs at their end. A head whose leading dims are rotated, i with i +
        rotary_dim / 2, is sorted so that these are the pairs: scores do not depend on the order.
        """
        pairs = np.arange(rotary_dim).reshape(2, -1).T.reshape(-1)
        return np.concatenate([np.arange(rotary_dim, self.head_dim), pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttention(Sublayer):
    """q with gates, k, v, norms of q and k by head, rope, attention to blocks, output projection.

    The input is not normed: it is what streams give.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: RMSNorm
    rope: Rope
    index: BlockIndex
    bias: bool = False

    @property
    def _rows(self) -> dict[str, int]:
        kv = self.num_kv_heads * self.head_dim
        return {"q_proj": 2 * self.num_heads * self.head_dim, "k_proj": kv, "v_proj": kv}

    @property
    def state(self) -> StateShape:
        """K and V of each position, a key of each block, the sum of one that is not complete."""
        plane, index = Plane(self.num_kv_heads, self.head_dim), self.index
        keys = Plane(1, index.head_dim, index.ratio)
        return StateShape((plane, plane, keys), pooling_state_nbytes(index.head_dim, overlap=False))

    @property
    def demand(self) -> Demand:
        """Columns of q, gates, k and v; all products, what was found and positions as arrays."""
        index, width = self.index, sum(self._rows.values()) + self.num_heads * self.head_dim
        limits = LatentLimits(
            heads=1,
            q_rank=1,
            head_dim=1,
            rank=1,
            key=1,
            index_heads=index.num_heads,
            index_dim=index.head_dim,
            index_per_block=entries_per_block(index.ratio),
        )
        arrays = width + self.hidden_size + 4 * index.rows + 3 * (index.budget + index.ratio)
        return Demand(attention_width=max(width, index.rows), run_width=arrays, latent=limits)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Projections, norms of heads, those of the indexer."""
        attn, hidden = f"{prefix}self_attn.", self.hidden_size
        found = []
        for name, rows in self._rows.items():
            found += linear(attn + name, rows, hidden, bias=self.bias)
        found += linear(f"{attn}o_proj", hidden, self.num_heads * self.head_dim, bias=self.bias)
        return [
            *found,
            self.norm.parameter(f"{attn}q_norm", self.head_dim),
            self.norm.parameter(f"{attn}k_norm", self.head_dim),
            *linear(f"{attn}indexer.index_qk_proj", self.index.rows, hidden),
            self.norm.parameter(f"{attn}indexer.q_layernorm", self.index.head_dim),
            self.norm.parameter(f"{attn}indexer.k_layernorm", self.index.head_dim),
        ]

    def bind(self, site: Site) -> BoundBlockSparseAttention:
        """Join it to its weights, its planes and its share of the cells."""
        attn, weights, state = f"{site.prefix}self_attn.", site.weights, site.state
        if state.cells is None:
            raise ValueError(f"layer {site.layer} was given no cells")
        matrices = [bind_linear(weights, attn + name, bias=self.bias) for name in self._rows]
        heads = Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rotary_dim=self.rope.rotary_dim,
            q_norm=self.norm.bind(weights, f"{attn}q_norm"),
            k_norm=self.norm.bind(weights, f"{attn}k_norm"),
            gated=True,
        )
        return BoundBlockSparseAttention(
            Projections((*matrices, bind_linear(weights, f"{attn}indexer.index_qk_proj"))),
            heads,
            keys_and_values(LayerState(state.planes[:2], None)),
            self.rope,
            self._bind_index(weights, f"{attn}indexer.", state.planes[2], state.cells),
            bind_linear(weights, f"{attn}o_proj", bias=self.bias),
        )

    def _bind_index(
        self, weights: Weights, prefix: str, plane: KVPlane, cells: CellLayer
    ) -> BoundBlockIndex:
        index, rotary_dim = self.index, self.rope.rotary_dim
        order = index.order(rotary_dim)
        q_norm = self.norm.bind(weights, f"{prefix}q_layernorm")
        k_norm = self.norm.bind(weights, f"{prefix}k_layernorm")
        return BoundBlockIndex(
            index,
            order,
            GroupNorm(index.head_dim, q_norm.eps, q_norm.weight),
            Pooling(
                bias=np.zeros(index.ratio * index.head_dim, np.float32),
                width=index.head_dim,
                stride=index.ratio,
                overlap=False,
                norm=Norm(k_norm.weight[order], k_norm.eps),
                rotary_dim=rotary_dim,
            ),
            EntryIndexer(
                num_heads=index.num_heads,
                head_dim=index.head_dim,
                rotary_dim=rotary_dim,
                scale=index.head_dim**-0.5,
                stride=index.ratio,
                top_k=index.top_k,
            ),
            plane,
            cells,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundBlockIndex:
    """The indexer, ready to compute."""

    index: BlockIndex
    order: NDArray[np.int64]
    q_norm: GroupNorm
    pooling: Pooling
    indexer: EntryIndexer
    plane: KVPlane
    cells: CellLayer

    def select(self, step: Step, rope: Rope, both: Floats) -> Ints | None:
        """Positions that each row sees, `[T, S]`; None where every row sees all before it.

        `both [T, rows]` holds index queries, then the index key.
        """
        kernels, batch, index = step.kernels, step.batch, self.index
        q, key = np.split(both, [index.num_heads * index.head_dim], axis=1)
        still = np.zeros((len(both), index.head_dim), np.float32)
        first = step.rope(rope, index.ratio - 1)
        keys = np.ascontiguousarray(key[:, self.order])
        kernels.pool_rows(self.pooling, keys, still, batch, first, self.cells, self.plane)
        blocks = step.selection(index.top_k, index.ratio)
        if blocks is None:
            return None
        normed = kernels.norm_rows(self.q_norm, q).reshape(-1, index.head_dim)
        heads = normed[:, self.order].reshape(q.shape)
        ones = np.ones((len(both), index.num_heads), np.float32)
        table = step.rope(rope)
        kernels.select_entries(self.indexer, heads, ones, batch, table, self.plane, blocks)
        return positions_of(blocks, batch.positions, index.ratio)


def positions_of(blocks: Ints, positions: Ints, ratio: int) -> Ints:
    """Positions that rows at `positions [T]` see, `[T, (N + 1) ratio - 1]`: ascending, then -1.

    Of a row that has more than N complete blocks those of `blocks [T, N]`, and what follows all
    complete ones; of any other row all positions.
    """
    (rows, top_k), complete = blocks.shape, (positions + 1) // ratio
    width = (top_k + 1) * ratio - 1
    found = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)).copy()
    chosen = complete > top_k
    inside = blocks[chosen][:, :, None] * ratio + np.arange(ratio, dtype=np.int32)
    found[chosen, : top_k * ratio] = inside.reshape(len(inside), top_k * ratio)
    tail = complete[chosen, None] * ratio + np.arange(ratio - 1, dtype=np.int32)
    found[chosen, top_k * ratio :] = tail
    found[found > positions[:, None]] = -1
    return found


@dataclass(frozen=True, slots=True, eq=False)
class BoundBlockSparseAttention(BoundSublayer):
    """Attention to blocks, ready to compute."""

    projections: Projections
    heads: Heads
    kv: KVLayer
    rope: Rope
    index: BoundBlockIndex
    o_proj: Matrix

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        for rows, run in step.runs():
            self._run(run, x[rows], y[rows])

    def _run(self, step: Step, x: Floats, y: Floats) -> None:
        kernels, batch = step.kernels, step.batch
        q, k, v, both = kernels.project(self.projections, x)
        selected = self.index.select(step, self.rope, both)
        table = step.rope(self.rope)
        found = kernels.attend(self.heads, q, k, v, batch, table, self.kv, selected=selected)
        y += kernels.matmul(self.o_proj, found)
