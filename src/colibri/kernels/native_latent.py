"""Latent attention as structs of native/abi_latent.cdef, and what the kernels refuse of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.formats import FloatFormat, Floats, RowInt8Format
from colibri.kernels.api import KV_BLOCK, Batch, CellLayer, Ints, KVPlane, Matrix, Norm
from colibri.kernels.latent import Indexer, LatentAttention, LatentCache
from colibri.kernels.native_structs import Structs, address_of
from colibri.kernels.shared_key import Pooling

_MOST_LATENT, _MOST_ROPE_DIM = 512, 128  # MOST_LATENT, MOST_ROPE_DIM of native/kern_latent.h
_MOST_INDEX_HEADS, _MOST_INDEX_DIM = 128, 256  # of native/kern_index.h


def latent_layer(structs: Structs, layer: LatentAttention) -> Any:
    """`colibri_latent *`.

    Raises:
        ValueError: its shapes contradict each other, or are larger than the kernels are made for.
    """
    return structs.made("colibri_latent", layer, lambda a: _latent(structs, a))


def latent_state(structs: Structs, layer: LatentAttention, cache: LatentCache) -> Any:
    """`colibri_latent_state *`, without a selection.

    Raises:
        ValueError: the cache was made for another layer.
    """
    _check_cache(layer, cache)
    return structs.made("colibri_latent_state", cache, lambda c: _state(structs, c))


def check_selected(layer: LatentAttention, batch: Batch, selected: Ints | None) -> None:
    """Refuse a selection that native code would read or write past.

    Raises:
        ValueError: it is missing where a row needs it, or names positions that the row has not.
    """
    if layer.top_k is None:
        return
    complete = (batch.positions + 1) // layer.pool
    if int(complete.max(initial=0)) <= layer.top_k:
        return
    if selected is None:
        raise ValueError(f"rows with more than {layer.top_k} keys need a selection")
    if layer.indexer is not None:
        return
    rows = complete > layer.top_k
    chosen, limit = selected[rows], complete[rows]
    if chosen.size and (chosen.min() < 0 or (chosen.max(axis=1) >= limit).any()):
        raise ValueError("the selection names positions that its row does not have")


def _latent(structs: Structs, a: LatentAttention) -> dict[str, Any]:
    _check_latent(a)
    matrices = ("q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")
    plain = ("num_heads", "nope_dim", "rope_dim", "value_dim", "rotary_dim", "scale")
    return {
        **{name: structs.matrix(getattr(a, name))[0] for name in matrices},
        **{name: getattr(a, name) for name in plain},
        "norm": structs.norm(a.norm)[0],
        "kv_norm": structs.norm(a.kv_norm)[0],
        **({} if a.q_norm is None else {"q_norm": structs.norm(a.q_norm)[0]}),
        **({} if a.q_a_proj is None else {"q_a_proj": structs.matrix(a.q_a_proj)[0]}),
        **({} if a.indexer is None else {"indexer": _indexer(structs, a.indexer)}),
        "rope_pairs": a.rope_pairing == "pair",
        "top_k": a.top_k or 0,
        "pool": a.pool,
    }


def _indexer(structs: Structs, i: Indexer) -> dict[str, Any]:
    plain = ("num_heads", "head_dim", "rotary_dim", "scale", "weight_scale")
    return {
        **{n: structs.matrix(getattr(i, n))[0] for n in ("q_proj", "k_proj", "weights_proj")},
        **{name: getattr(i, name) for name in plain},
        "k_norm": structs.norm(i.k_norm)[0],
        "k_norm_bias": address_of(
            structs.library,
            i.k_norm_bias,
            np.float32,
            "float[]",
            (i.head_dim,),
            "the bias of k_norm",
        ),
        "rope_pairs": i.rope_pairing == "pair",
        **({} if i.gate_proj is None else {"gate_proj": structs.matrix(i.gate_proj)[0]}),
        **({} if i.pooling is None else {"pooling": pooling_of(structs, i.pooling)}),
    }


def pooling_of(structs: Structs, p: Pooling) -> dict[str, Any]:
    """The values of a `colibri_pooling`.

    Raises:
        ValueError: its sizes contradict each other.
    """
    if p.rotary_dim % 2 or p.rotary_dim > p.width:
        raise ValueError(f"rotary_dim {p.rotary_dim} must be even, at most {p.width}")
    _check_norm(p.norm, p.width)
    size, bias = (p.stride * p.columns,), p.bias.reshape(-1)
    return {
        "bias": address_of(structs.library, bias, np.float32, "float[]", size, "bias"),
        **({} if p.norm is None else {"norm": structs.norm(p.norm)[0]}),
        "width": p.width,
        "stride": p.stride,
        "overlap": p.overlap,
        "rotary_dim": p.rotary_dim,
    }


def cell_layer_of(structs: Structs, state: CellLayer) -> dict[str, Any]:
    """The values of a `colibri_cell_layer`."""
    pool = address_of(structs.library, state.pool, np.uint8, "uint8_t[]", (-1,), "cells")
    return {
        "pool": pool,
        "pool_nbytes": state.pool.size,
        "cell_nbytes": state.cell_nbytes,
        "offset": state.offset,
    }


def _state(structs: Structs, cache: LatentCache) -> dict[str, Any]:
    names = ("latent", "rope_key", "index_key")
    planes = {name: getattr(cache, name) for name in names}
    found = {name: plane_of(structs, plane) for name, plane in planes.items() if plane is not None}
    return found if cache.sums is None else {**found, "sums": cell_layer_of(structs, cache.sums)}


def plane_of(structs: Structs, plane: KVPlane) -> dict[str, Any]:
    """The values of a `colibri_plane`."""
    return {
        "pool": address_of(structs.library, plane.pool, np.uint8, "uint8_t[]", (-1,), "K/V pool"),
        "pool_nbytes": plane.pool.size,
        "block_nbytes": plane.block_nbytes,
        "offset": plane.offset,
        "format": plane.format.code,
        "width": plane.width,
        "stride": plane.stride,
    }


def _check_cache(layer: LatentAttention, cache: LatentCache) -> None:
    wanted = {"latent": (layer.kv_norm.weight.size, 1), "rope_key": (layer.rope_dim, 1)}
    if layer.indexer is not None:
        wanted["index_key"] = (layer.indexer.head_dim, layer.pool)
        if (cache.sums is None) != (layer.indexer.pooling is None):
            raise ValueError(f"index keys pooled by {layer.pool} need sums, found {cache.sums}")
    for name, (width, stride) in wanted.items():
        plane: KVPlane | None = getattr(cache, name)
        if plane is None or (plane.heads, plane.width, plane.stride) != (1, width, stride):
            raise ValueError(f"{name}: the pool keeps {plane}, wanted one head of {width}")
        if not isinstance(plane.format, FloatFormat | RowInt8Format):
            raise ValueError(f"{name}: the pool holds f32, bf16, f16 or int8, not {plane.format}")
        nbytes = plane.format.nbytes((max(1, KV_BLOCK // stride), width))
        if plane.offset < 0 or plane.offset + nbytes > plane.block_nbytes:
            raise ValueError(f"{name}: {nbytes} bytes do not fit a block of {plane.block_nbytes}")


def _check_latent(a: LatentAttention) -> None:
    rank, hidden, heads = a.kv_norm.weight.size, a.norm.weight.size, a.num_heads
    low = hidden if a.q_a_proj is None else a.q_a_proj.rows
    wanted = {
        "q_b_proj": (heads * (a.nope_dim + a.rope_dim), low),
        "kv_a_proj": (rank + a.rope_dim, hidden),
        "kv_b_proj": (heads * (a.nope_dim + a.value_dim), rank),
        "o_proj": (hidden, heads * a.value_dim),
    }
    if a.q_a_proj is not None:
        wanted["q_a_proj"] = (low, hidden)
        _check_norm(a.q_norm, low)
    elif a.q_norm is not None:
        raise ValueError("q_norm without q_a_proj")
    if a.indexer is not None:
        _check_indexer(a, a.indexer, low)
    _check_shapes(a, wanted)
    if not isinstance(a.kv_b_proj.format, FloatFormat) or a.kv_b_proj.bias is not None:
        raise ValueError(f"kv_b_proj is absorbed: f32, f16 or bf16, not {a.kv_b_proj.format}")
    if rank > _MOST_LATENT or a.rope_dim > _MOST_ROPE_DIM:
        raise ValueError(f"a latent of {rank} and a rope key of {a.rope_dim} are too large")
    if a.rotary_dim not in (0, a.rope_dim) or a.rotary_dim % 2:
        raise ValueError(f"rotary_dim is {a.rotary_dim}, wanted 0 or {a.rope_dim}, even")


def _check_indexer(a: LatentAttention, i: Indexer, low: int) -> None:
    hidden = a.norm.weight.size
    wanted = {
        "q_proj": (i.num_heads * i.head_dim, low),
        "k_proj": (i.head_dim, hidden),
        "weights_proj": (i.num_heads, hidden),
    }
    if i.gate_proj is not None:
        wanted["gate_proj"] = (i.head_dim, hidden)
    _check_shapes(i, wanted)
    _check_norm(i.k_norm, i.head_dim)
    pooled = 1 if i.pooling is None else i.pooling.stride
    plain = i.pooling is None or (i.pooling.width == i.head_dim and not i.pooling.overlap)
    blocks = KV_BLOCK % pooled == 0 or pooled % KV_BLOCK == 0
    if (i.pooling is None) != (i.gate_proj is None) or pooled != a.pool or not plain or not blocks:
        raise ValueError(f"index keys pooled by {pooled} for entries of {a.pool} positions")
    if a.top_k is None or i.rotary_dim != a.rotary_dim or i.rotary_dim > i.head_dim:
        raise ValueError(f"an indexer with rotary_dim {i.rotary_dim}, top_k {a.top_k}")
    if i.num_heads > _MOST_INDEX_HEADS or i.head_dim > _MOST_INDEX_DIM:
        raise ValueError(f"{i.num_heads} index heads of {i.head_dim} are too large")


def _check_shapes(of: object, wanted: dict[str, tuple[int, int]]) -> None:
    matrices: dict[str, Matrix] = {name: getattr(of, name) for name in wanted}
    found = {name: (matrix.rows, matrix.columns) for name, matrix in matrices.items()}
    if found != wanted:
        raise ValueError(f"latent attention shapes contradict each other: {found}, wanted {wanted}")


def _check_norm(norm: Norm | None, width: int) -> None:
    found: Floats | None = None if norm is None else norm.weight
    if found is not None and found.size != width:
        raise ValueError(f"a norm has {found.size} weights, wanted {width}")
