"""Multi-head latent attention in NumPy; see `kernels.latent` for the formulae."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, Ints, Matrix, RopeTable
from colibri.kernels.latent import Indexer, LatentAttention, LatentCache
from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_math import rms_norm, softmax
from colibri.kernels.reference_planes import best, read_entries, read_plane, write_plane
from colibri.kernels.reference_pooling import pool_rows

MatMul = Callable[[Matrix, Floats], Floats]


def latent_step(
    matmul: MatMul,
    layer: LatentAttention,
    x: Floats,
    batch: Batch,
    rope: RopeTable,
    cache: LatentCache,
    selected: Ints | None,
) -> Floats:
    """What `Kernels.latent_step` adds, `[T, D]`."""
    hidden = rms_norm(x, layer.norm)
    low = hidden
    if layer.q_a_proj is not None:
        low = matmul(layer.q_a_proj, hidden)
        low = low if layer.q_norm is None else rms_norm(low, layer.q_norm)
    q = matmul(layer.q_b_proj, low).reshape(len(x), layer.num_heads, -1)  # [T, H, dn + dr]
    rank = layer.kv_norm.weight.size
    latent, key = np.split(matmul(layer.kv_a_proj, hidden), [rank], axis=1)
    q_rope, key = q[..., layer.nope_dim :], key[:, None]
    if layer.rotary_dim:
        q_rope, key = (rotate(part, rope, layer.rope_pairing) for part in (q_rope, key))
    write_plane(cache.latent, batch, rms_norm(latent, layer.kv_norm))
    write_plane(cache.rope_key, batch, key[:, 0])
    if layer.indexer is not None:
        assert layer.top_k is not None
        select(matmul, layer.indexer, layer.top_k, hidden, low, batch, rope, cache, selected)
    weights = layer.kv_b_proj.format.decode(
        layer.kv_b_proj.data, (layer.kv_b_proj.rows, layer.kv_b_proj.columns)
    )
    by_head = weights.reshape(layer.num_heads, -1, rank)  # [H, dn + dv, r]
    to_key, to_value = by_head[:, : layer.nope_dim], by_head[:, layer.nope_dim :]
    absorbed = np.einsum("thd,hdr->thr", q[..., : layer.nope_dim], to_key, optimize=True)
    queries = np.concatenate([absorbed, q_rope], axis=2)  # [T, H, r + dr]
    found = np.empty_like(absorbed)
    for row, position in enumerate(batch.positions.tolist()):
        table = batch.block_tables[batch.members[row]]
        latents, keys = (read_plane(p, table, position + 1) for p in (cache.latent, cache.rope_key))
        seen = _seen(layer, position, None if selected is None else selected[row])
        found[row] = _attend(queries[row], latents[seen], keys[seen], layer.scale)
    mixed = np.einsum("thr,hvr->thv", found, to_value, optimize=True)
    return matmul(layer.o_proj, np.ascontiguousarray(mixed.reshape(len(x), -1), np.float32))


def _seen(layer: LatentAttention, position: int, selected: Ints | None) -> slice | Ints:
    """The positions that a row sees: those of selected entries, and of the last incomplete one."""
    complete = (position + 1) // layer.pool
    if layer.top_k is None or complete <= layer.top_k:
        return slice(None)
    assert selected is not None
    chosen = selected[:, None] * layer.pool + np.arange(layer.pool, dtype=np.int32)
    tail = np.arange(complete * layer.pool, position + 1, dtype=np.int32)
    return np.concatenate([chosen.reshape(-1), tail])


def _attend(queries: Floats, latents: Floats, keys: Floats, scale: float) -> Floats:
    """One row's heads `[H, r + dr]` over `latents [S, r]` and rope keys `[S, dr]`: `[H, r]`."""
    scores = queries @ np.concatenate([latents, keys], axis=1).T * np.float32(scale)
    out: Floats = softmax(scores) @ latents
    return out


def select(
    matmul: MatMul,
    indexer: Indexer,
    top_k: int,
    hidden: Floats,
    low: Floats,
    batch: Batch,
    rope: RopeTable,
    cache: LatentCache,
    selected: Ints | None,
) -> None:
    """Keep the index keys of all rows and write the selection of those that need one."""
    assert cache.index_key is not None
    key = matmul(indexer.k_proj, hidden)
    centred = key - key.mean(axis=1, keepdims=True)
    spread = np.sqrt(
        np.square(centred).mean(axis=1, keepdims=True) + np.float32(indexer.k_norm.eps)
    )
    key = (centred / spread * indexer.k_norm.weight + indexer.k_norm_bias)[:, None]
    q = matmul(indexer.q_proj, low).reshape(len(hidden), indexer.num_heads, -1)
    if indexer.rotary_dim:
        q, key = (rotate(part, rope, indexer.rope_pairing) for part in (q, key))
    stride = 1
    if indexer.pooling is None:
        write_plane(cache.index_key, batch, key[:, 0])
    else:
        assert indexer.gate_proj is not None
        assert cache.sums is not None
        gates, stride = matmul(indexer.gate_proj, hidden), indexer.pooling.stride
        pool_rows(indexer.pooling, key[:, 0], gates, batch, rope, cache.sums, cache.index_key)
    weights = matmul(indexer.weights_proj, hidden) * np.float32(indexer.weight_scale)
    complete = (batch.positions + 1) // stride
    for row in np.flatnonzero(complete > top_k):
        assert selected is not None
        table = batch.block_tables[batch.members[row]]
        keys = read_entries(cache.index_key, table, int(complete[row]))
        scores = weights[row] @ np.maximum(q[row] @ keys.T * np.float32(indexer.scale), 0)
        selected[row] = best(scores, top_k)
