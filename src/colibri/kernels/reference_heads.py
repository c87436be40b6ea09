"""Softmax attention of projected heads in NumPy; see `kernels.heads`."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats, RowInt8Format
from colibri.kernels.api import KV_BLOCK, Batch, Ints, KVLayer, Norm, RopeTable
from colibri.kernels.heads import Heads, RelativeBias
from colibri.kernels.reference_math import rms_norm, sigmoid, softmax


class ReferenceHeads:
    """`HeadKernels` in NumPy; a part of `ReferenceKernels`."""

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
        """Write K and V into the pool, attend from the pool."""
        gate = None
        if layer.gated:
            pairs = q.reshape(len(q), layer.num_heads, 2, layer.head_dim)
            q, gate = pairs[:, :, 0].reshape(len(q), -1), pairs[:, :, 1].reshape(len(q), -1)
        queries = rotate(_heads(layer, q, layer.q_norm), rope, layer.rope_pairing)  # [T, H, hd]
        keys = rotate(_heads(layer, k, layer.k_norm), rope, layer.rope_pairing)  # [T, K, hd]
        if temperature is not None:
            queries = queries * temperature[:, None, None]
            relative = None if relative is None else relative * temperature[:, None]
        pool = _PoolView(kv)
        pool.write(batch, keys, _heads(layer, v, None))
        mixed = np.empty_like(queries)
        for member in np.unique(batch.members):
            rows = np.flatnonzero(batch.members == member)
            positions = batch.positions[rows]
            cached = pool.read(batch.block_tables[member], int(positions.max()) + 1)  # [S, K, hd]
            bias = None
            if layer.relative is not None and relative is not None:
                bias = _bias(layer.relative, relative[rows], positions, len(cached[0]))
            chosen = None if selected is None else selected[rows]
            mixed[rows] = attend(
                queries[rows],
                *cached,
                positions,
                layer.scale,
                layer.window,
                layer.sinks,
                bias,
                chosen,
            )
        found: Floats = mixed.reshape(len(q), -1)
        return found if gate is None else found * sigmoid(gate)


def _bias(layer: RelativeBias, relative: Floats, positions: Ints, num_keys: int) -> Floats:
    """What is added to scores, `[T, H, S]`."""
    rank, extent = layer.weight.shape
    by_distance = relative.reshape(len(relative), -1, rank) @ layer.weight  # [T, H, extent]
    distance = positions[:, None] - np.arange(num_keys)
    near = ((distance >= 0) & (distance < extent))[:, None]
    found = np.take_along_axis(by_distance, distance.clip(0, extent - 1)[:, None], axis=2)
    return np.where(near, found, np.float32(0))


def _heads(layer: Heads, projected: Floats, norm: Norm | None) -> Floats:
    """Norm over a head or over the whole projection, clip; `[T, heads, head_dim]`."""
    width = projected.shape[1]
    if norm is not None and norm.weight.size == width:
        projected = rms_norm(projected, norm)
    out = projected.reshape(len(projected), -1, layer.head_dim)
    if norm is not None and norm.weight.size == layer.head_dim != width:
        out = rms_norm(out, norm)
    return out if layer.clip is None else np.clip(out, -layer.clip, layer.clip)


def rotate(x: Floats, rope: RopeTable, pairing: str) -> Floats:
    """Rotate the leading `2 * cos.shape[1]` dims of `x [T, heads, head_dim]`."""
    half = rope.cos.shape[1]
    if half == 0:
        return x
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    out = x.copy()
    if pairing == "half":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: Ints,
    scale: float,
    window: int | None,
    sinks: Floats | None = None,
    bias: Floats | None = None,
    selected: Ints | None = None,
) -> Floats:
    """Causal attention of `q [T, H, hd]` over `k, v [S, K, hd]`; key j stands at position j.

    `bias [T, H, S]` is added to scores; of `selected [T, N]` only those keys are seen.
    """
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)  # [T, K, H/K, hd]
    scores = np.einsum("tkgd,skd->tkgs", grouped, k, optimize=True) * np.float32(scale)
    scores = scores if bias is None else scores + bias.reshape(scores.shape)
    age = positions[:, None] - np.arange(len(k))
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    if selected is not None:
        seen &= (selected[:, :, None] == np.arange(len(k))).any(axis=1)
    masked = np.where(seen[:, None, None], scores, np.float32(-np.inf))
    if sinks is not None:
        column = np.broadcast_to(sinks.reshape(1, k.shape[1], -1, 1), (*scores.shape[:3], 1))
        masked = np.concatenate([masked, column], axis=3)
    weights = softmax(masked)[..., : len(k)]
    mixed = np.einsum("tkgs,skd->tkgd", weights, v, optimize=True)
    return np.asarray(mixed).reshape(rows, heads, head_dim)


class _PoolView:
    """A layer's K/V blocks in storage items: K `[blocks, K, hd, 64]`, V `[blocks, K, 64, hd]`."""

    def __init__(self, kv: KVLayer) -> None:
        self._format = kv.format
        heads = kv.num_kv_heads
        part = kv.format.nbytes((heads * KV_BLOCK, kv.head_dim))
        own = kv.pool[kv.offset :]  # blocks may start at any multiple of `block_nbytes`
        blocks = (own.size - 2 * part) // kv.block_nbytes + 1
        steps = kv.block_nbytes, part, 1
        parts = np.lib.stride_tricks.as_strided(own, (blocks, 2, part), steps)
        dtype = np.dtype(np.int8) if isinstance(kv.format, RowInt8Format) else kv.format.dtype
        size = heads * KV_BLOCK * kv.head_dim * dtype.itemsize
        items = parts[:, :, :size].view(dtype)
        keys = items[:, 0].reshape(blocks, heads, kv.head_dim, KV_BLOCK)
        values = items[:, 1].reshape(blocks, heads, KV_BLOCK, kv.head_dim)
        scales = parts[:, :, size:].view(np.float32).reshape(blocks, 2, -1, KV_BLOCK)
        self._items = keys.transpose(0, 1, 3, 2), values  # both [blocks, K, 64, hd]
        self._scales = scales[:, 0], scales[:, 1]

    def write(self, batch: Batch, k: Floats, v: Floats) -> None:
        blocks = batch.block_tables[batch.members, batch.positions // KV_BLOCK]
        place = batch.positions % KV_BLOCK
        for items, all_scales, rows in zip(self._items, self._scales, (k, v), strict=True):
            if isinstance(self._format, RowInt8Format):
                codes, scales = self._format.round(rows)
                items[blocks, :, place] = codes
                all_scales[blocks, :, place] = scales
            else:
                items[blocks, :, place] = self._format.from_float32(rows)

    def read(self, table: Ints, length: int) -> tuple[Floats, Floats]:
        blocks = table[: -(-length // KV_BLOCK)]
        return self._part(0, blocks, length), self._part(1, blocks, length)

    def _part(self, which: int, blocks: Ints, length: int) -> Floats:
        items = self._items[which][blocks]  # [B, K, 64, hd]
        if isinstance(self._format, RowInt8Format):
            wide = items.astype(np.float32) * self._scales[which][blocks][..., None]
        else:
            wide = self._format.to_float32(items)
        by_position: Floats = wide.transpose(0, 2, 1, 3)
        return by_position.reshape(-1, *by_position.shape[2:])[:length]
