"""Attention over one key a position, which is its value too, and over entries of several positions.

After DeepSeek-V4: all heads share a key, a row sees those of the last `window` positions, and of
the whole past one *entry* for every `stride` positions, in some layers only the entries that an
indexer scores best. An entry is a sum of what its positions project, weighed channel by channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from colibri.formats import FloatFormat, Floats, RowInt8Format

if TYPE_CHECKING:
    from colibri.kernels.api import (
        Batch,
        CellLayer,
        Ints,
        KVPlane,
        Matrix,
        Norm,
        RopeTable,
    )

WINDOW_SLACK = 256  # rows of a step whose keys are written before the first of them is attended to


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """Entries of `stride` positions: `e = norm(sum_j softmax_j(gate_j + bias_j) value_j)`.

    The softmax is one a channel, over the positions of the entry, j being a position's place among
    them. With `overlap` values, gates and bias have two halves, and an entry sums over the first
    half of the `stride` positions before (as far as there are any) and the second half of its own.
    The trailing `rotary_dim` of an entry are rotated in pairs, as at its first position.

    The state of a sequence is a maximum, a sum of weights and a sum of weighted values for each
    channel, `[3, width]` float32: of the entry at hand, and with `overlap` before it of the next.

    Attributes:
        bias: `[stride, width]`, or `[stride, 2 width]` with `overlap`.
        norm: RMS norm of the entry, or None.
    """

    bias: Floats
    width: int
    stride: int
    overlap: bool = False
    norm: Norm | None = None
    rotary_dim: int = 0

    @property
    def columns(self) -> int:
        """Columns of values and of gates."""
        return self.width * (2 if self.overlap else 1)

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return pooling_state_nbytes(self.width, overlap=self.overlap)


def pooling_state_nbytes(width: int, *, overlap: bool) -> int:
    """Bytes that a pooling keeps of one sequence."""
    return 4 * 3 * width * (2 if overlap else 1)


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Scores of a row's entries e: `sum_h w_h relu(q_h . k_e * scale)`; the best `top_k` are seen.

    The trailing `rotary_dim` of q are rotated in pairs. Ties go to the lower entry.
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    stride: int
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeyAttention:
    """Softmax attention of H heads over keys that they share; a key is its own value.

    A row at position p sees the positions `p - window < j <= p`, then, ascending, the entries that
    are complete: `w < (p + 1) // stride`, or where these are more than `top_k` the selected ones.
    The trailing `rotary_dim` of q and k are rotated in pairs, and those of the output back.

    Attributes:
        sinks: `[H]` scores without a value.
        stride: positions that share an entry; 0 where there are no entries.
        top_k: entries that a row sees at most; None sees all.
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    window: int
    sinks: Floats
    stride: int = 0
    top_k: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CellWindow:
    """The last positions of each sequence, in its cell: position p lies in row `p % positions`.

    A cell's share holds the format's matrix `[positions, width]`.
    """

    cells: CellLayer
    format: FloatFormat | RowInt8Format
    width: int
    positions: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeyCache:
    """Where a layer keeps the keys of the window's positions, and of entries (one head).

    Attributes:
        key: at least `WINDOW_SLACK` rows more than the window.
    """

    key: CellWindow
    entry: KVPlane | None = None


class SharedKeyKernels(Protocol):
    """The parts of such a layer, part of `Kernels`."""

    def pool_rows(
        self,
        layer: Pooling,
        values: Floats,
        gates: Floats,
        batch: Batch,
        first: RopeTable,
        state: CellLayer,
        plane: KVPlane,
    ) -> None:
        """Carry the sums over the rows; entries that become complete are rounded into the plane.

        `values` and `gates` are `[T, columns]`; values are used up. `first` holds cosine and sine
        of the first position of each row's entry, and counts where the row is its last.
        """

    def select_entries(
        self,
        layer: EntryIndexer,
        q: Floats,
        weights: Floats,
        batch: Batch,
        rope: RopeTable,
        plane: KVPlane,
        selected: Ints,
    ) -> None:
        """Write `selected [T, top_k]`, ascending, of rows that have more than `top_k` entries.

        `q [T, n head_dim]` is used up; `weights [T, n]`.
        """

    def shared_key_attention(
        self,
        layer: SharedKeyAttention,
        q: Floats,
        k: Floats,
        batch: Batch,
        rope: RopeTable,
        cache: SharedKeyCache,
        selected: Ints | None = None,
    ) -> Floats:
        """What the heads find, `[T, H head_dim]`; q `[T, H head_dim]` and k `[T, head_dim]`.

        Both are used up; k is rounded into the cache, and keys are read from there alone.
        """

    def matmul_groups(self, matrix: Matrix, num_groups: int, x: Floats) -> Floats:
        """Each of `num_groups` runs of the matrix's rows times its own run of x's columns.

        `x [T, num_groups K]`, `[T, N]`.
        """
