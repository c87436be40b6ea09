"""Attention over shared keys and entries in NumPy; see `kernels.shared_key`."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Ints, KVPlane, Matrix, RopeTable
from colibri.kernels.reference_math import softmax
from colibri.kernels.reference_planes import best, read_entries, read_window, write_window
from colibri.kernels.reference_pooling import pool_rows, rotate_trailing
from colibri.kernels.shared_key import (
    WINDOW_SLACK,
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
        pool_rows(layer, values, gates, batch, first, state, plane)

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
        found = np.empty_like(heads)
        for row, position in enumerate(batch.positions.tolist()):
            if row % WINDOW_SLACK == 0:
                rows = slice(row, row + WINDOW_SLACK)
                write_window(cache.key, batch, rows, key[rows])
            table = batch.block_tables[batch.members[row]]
            cell = int(batch.cells[batch.members[row]])
            keys = read_window(cache.key, cell, max(0, position - layer.window + 1), position)
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


def _attend(layer: SharedKeyAttention, queries: Floats, keys: Floats) -> Floats:
    scores = queries @ keys.T * np.float32(layer.scale)
    weights = softmax(np.concatenate([scores, layer.sinks[:, None]], axis=1))[:, :-1]
    out: Floats = weights @ keys
    return out
