"""Attention over shared keys and entries in NumPy; see `kernels.shared_key`."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Ints, KVPlane, Matrix, RopeTable
from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_latent import best, read_entries, read_plane, write_entries
from colibri.kernels.reference_math import rms_norm, softmax
from colibri.kernels.reference_recurrent import cell_of
from colibri.kernels.shared_key import (
    EntryIndexer,
    Pooling,
    SharedKeyAttention,
    SharedKeyCache,
)


class ReferenceSharedKey:
    """`SharedKeyKernels` in NumPy; a part of `ReferenceKernels`."""

    @abstractmethod
    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """See `Kernels.matmul`."""

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
        """See `SharedKeyKernels.pool_rows`."""
        places = batch.positions % layer.stride
        parts = layer.columns // layer.width
        last = np.flatnonzero(places == layer.stride - 1).astype(np.int32)
        entries = np.empty((len(values), layer.width), np.float32)
        for row, place in enumerate(places.tolist()):
            sums = cell_of(state, int(batch.cells[batch.members[row]]), (parts, 3, layer.width))
            if place == 0:
                sums[-1] = sums[0] if layer.overlap else 0
                sums[:-1] = 0
            _take_in(sums, values[row], gates[row] + layer.bias.reshape(layer.stride, -1)[place])
            if place == layer.stride - 1:
                entries[row] = sums[-1, 2] / sums[-1, 1]
        found = entries[last] if layer.norm is None else rms_norm(entries[last], layer.norm)
        if layer.rotary_dim:
            found = rotate_trailing(found[:, None], _rows(first, last), layer.rotary_dim)[:, 0]
        write_entries(plane, batch, last, found)

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
        """See `SharedKeyKernels.select_entries`."""
        heads = q.reshape(len(q), layer.num_heads, layer.head_dim)
        heads = rotate_trailing(heads, rope, layer.rotary_dim)
        complete = (batch.positions + 1) // layer.stride
        for row in np.flatnonzero(complete > layer.top_k):
            table = batch.block_tables[batch.members[row]]
            keys = read_entries(plane, table, int(complete[row]))
            scores = weights[row] @ np.maximum(heads[row] @ keys.T * np.float32(layer.scale), 0)
            selected[row] = best(scores, layer.top_k)

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
        """See `SharedKeyKernels.shared_key_attention`."""
        heads = q.reshape(len(q), layer.num_heads, layer.head_dim)
        heads = rotate_trailing(heads, rope, layer.rotary_dim)
        key = rotate_trailing(k[:, None], rope, layer.rotary_dim)[:, 0]
        write_entries(cache.key, batch, np.arange(len(q), dtype=np.int32), key)
        found = np.empty_like(heads)
        for row, position in enumerate(batch.positions.tolist()):
            table = batch.block_tables[batch.members[row]]
            keys = read_plane(cache.key, table, position + 1)[-layer.window :]
            if cache.entry is not None and (num := (position + 1) // layer.stride):
                entries = read_entries(cache.entry, table, num)
                if layer.top_k is not None and num > layer.top_k:
                    assert selected is not None
                    entries = entries[selected[row]]
                keys = np.concatenate([keys, entries])
            found[row] = _attend(layer, heads[row], keys)
        back = RopeTable(rope.cos, -rope.sin)
        return rotate_trailing(found, back, layer.rotary_dim).reshape(len(q), -1)

    def matmul_groups(self, matrix: Matrix, num_groups: int, x: Floats) -> Floats:
        """See `SharedKeyKernels.matmul_groups`."""
        runs = np.split(x, num_groups, axis=1)
        rows = matrix.rows // num_groups
        found = [
            self.matmul(matrix, run)[:, group * rows : (group + 1) * rows]
            for group, run in enumerate(runs)
        ]
        return np.concatenate(found, axis=1)


def _take_in(sums: Floats, value: Floats, score: Floats) -> None:
    """One position more, in sums `[parts, 3, width]`; a sum of 0 says that it is the first."""
    most, weight, total = sums[:, 0], sums[:, 1], sums[:, 2]
    value, score = value.reshape(most.shape), score.reshape(most.shape)
    before = np.where(weight == 0, score, most)
    now = np.maximum(before, score)
    keep, share = np.exp(before - now), np.exp(score - now)
    sums[:, 0] = now
    sums[:, 1] = weight * keep + share
    sums[:, 2] = total * keep + share * value


def _attend(layer: SharedKeyAttention, queries: Floats, keys: Floats) -> Floats:
    scores = queries @ keys.T * np.float32(layer.scale)
    weights = softmax(np.concatenate([scores, layer.sinks[:, None]], axis=1))[:, :-1]
    out: Floats = weights @ keys
    return out


def rotate_trailing(x: Floats, rope: RopeTable, rotary_dim: int) -> Floats:
    """Rotate pairs of the last `rotary_dim` dims of `x [T, heads, head_dim]`."""
    start = x.shape[2] - rotary_dim
    return np.concatenate([x[..., :start], rotate(x[..., start:], rope, "pair")], axis=2)


def _rows(rope: RopeTable, rows: Ints) -> RopeTable:
    return RopeTable(rope.cos[rows], rope.sin[rows])
