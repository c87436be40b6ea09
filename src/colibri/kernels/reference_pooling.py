"""Entries that several positions share, in NumPy; see `kernels.shared_key.Pooling`."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Ints, KVPlane, RopeTable
from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_math import rms_norm
from colibri.kernels.reference_planes import write_entries
from colibri.kernels.reference_recurrent import cell_of
from colibri.kernels.shared_key import Pooling


def pool_rows(
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


def rotate_trailing(x: Floats, rope: RopeTable, rotary_dim: int) -> Floats:
    """Rotate pairs of the last `rotary_dim` dims of `x [T, heads, head_dim]`."""
    start = x.shape[2] - rotary_dim
    return np.concatenate([x[..., :start], rotate(x[..., start:], rope, "pair")], axis=2)


def _rows(rope: RopeTable, rows: Ints) -> RopeTable:
    return RopeTable(rope.cos[rows], rope.sin[rows])
