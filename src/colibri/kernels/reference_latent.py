"""Multi-head latent attention in NumPy; see `kernels.latent` for the formulae."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from colibri.formats import Floats, RowInt8Format
from colibri.kernels.api import KV_BLOCK, Batch, Ints, KVPlane, Matrix, RopeTable
from colibri.kernels.latent import Indexer, LatentAttention, LatentCache
from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_math import rms_norm, softmax

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
        seen: slice | Ints = slice(None)
        if layer.top_k is not None and position >= layer.top_k:
            assert selected is not None
            seen = selected[row]
        found[row] = _attend(queries[row], latents[seen], keys[seen], layer.scale)
    mixed = np.einsum("thr,hvr->thv", found, to_value, optimize=True)
    return matmul(layer.o_proj, np.ascontiguousarray(mixed.reshape(len(x), -1), np.float32))


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
    write_plane(cache.index_key, batch, key[:, 0])
    weights = matmul(indexer.weights_proj, hidden) * np.float32(indexer.weight_scale)
    for row in np.flatnonzero(batch.positions >= top_k):
        assert selected is not None
        table = batch.block_tables[batch.members[row]]
        keys = read_plane(cache.index_key, table, int(batch.positions[row]) + 1)
        scores = weights[row] @ np.maximum(q[row] @ keys.T * np.float32(indexer.scale), 0)
        selected[row] = best(scores, top_k)


def best(scores: Floats, top_k: int) -> Ints:
    """The largest `top_k` of `scores [S]`, ascending; ties go to the lower."""
    order = np.argsort(-scores, kind="stable")[:top_k]
    return np.sort(order).astype(np.int32)


def write_plane(plane: KVPlane, batch: Batch, rows: Floats) -> None:
    """Round `rows [T, width]` into their positions of a plane of one head."""
    write_entries(plane, batch, np.arange(len(rows), dtype=np.int32), rows)


def write_entries(plane: KVPlane, batch: Batch, rows: Ints, values: Floats) -> None:
    """Round `values [R, width]` into the entries whose last positions are the batch's `rows`."""
    positions = batch.positions[rows]
    blocks = batch.block_tables[batch.members[rows], positions // KV_BLOCK]
    place = positions % KV_BLOCK // plane.stride
    items, scales = _views(plane)
    if isinstance(plane.format, RowInt8Format):
        items[blocks, place], scales[blocks, place] = plane.format.round(values)
    else:
        items[blocks, place] = plane.format.from_float32(values)


def read_entries(plane: KVPlane, table: Ints, num: int) -> Floats:
    """The first `num` entries `[num, width]` of the sequence whose blocks are `table`."""
    last = np.arange(1, num + 1) * plane.stride - 1
    blocks, place = table[last // KV_BLOCK], last % KV_BLOCK // plane.stride
    items, scales = _views(plane)
    if isinstance(plane.format, RowInt8Format):
        wide = items[blocks, place].astype(np.float32) * scales[blocks, place][..., None]
    else:
        wide = plane.format.to_float32(items[blocks, place])
    return np.asarray(wide, np.float32)


def read_plane(plane: KVPlane, table: Ints, length: int) -> Floats:
    """The first `length` positions `[length, width]` of the sequence whose blocks are `table`."""
    blocks = table[: -(-length // KV_BLOCK)]
    items, scales = _views(plane)
    if isinstance(plane.format, RowInt8Format):
        wide = items[blocks].astype(np.float32) * scales[blocks][..., None]
    else:
        wide = plane.format.to_float32(items[blocks])
    return np.asarray(wide, np.float32).reshape(-1, plane.width)[:length]


def _views(plane: KVPlane) -> tuple[Floats, Floats]:
    """Items `[blocks, entries, width]` and, for int8, scales `[blocks, entries]`."""
    entries = max(1, KV_BLOCK // plane.stride)
    num = plane.pool.size // plane.block_nbytes
    by_block = plane.pool[: num * plane.block_nbytes].reshape(num, plane.block_nbytes)
    own = by_block[:, plane.offset :]
    dtype = np.dtype(np.int8) if isinstance(plane.format, RowInt8Format) else plane.format.dtype
    size = entries * plane.width * dtype.itemsize
    items = own[:, :size].view(dtype).reshape(num, entries, plane.width)
    return items, own[:, size : size + 4 * entries].view(np.float32).reshape(num, -1)
