"""Shared keys, entries and residual streams in C; see native/abi_shared_key.cdef."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import KV_BLOCK, Batch, CellLayer, Ints, KVPlane, Matrix, RopeTable
from colibri.kernels.native_latent import cell_layer_of, plane_of, pooling_of
from colibri.kernels.native_recurrent import NativeRecurrent
from colibri.kernels.shared_key import (
    WINDOW_SLACK,
    EntryIndexer,
    Pooling,
    SharedKeyAttention,
    SharedKeyCache,
)
from colibri.kernels.streams import StreamMix, stream_weights

_MOST_KEY, _MOST_ROPE_DIM = 512, 128  # MOST_LATENT, MOST_ROPE_DIM of native/kern_lane_attend.h
_MOST_INDEX_HEADS, _MOST_INDEX_DIM = 128, 256  # of native/kern_index.h
_MOST_STREAMS = 16  # of native/kern_streams.h


class NativeSharedKey(NativeRecurrent):
    """`SharedKeyKernels` and `StreamKernels` in C; a part of `NativeKernels`."""

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
        shape = (len(batch.positions), layer.columns)
        _check_plane(plane, layer.width, layer.stride)
        self._do(
            "colibri_pool_rows",
            self._structs.made("colibri_pooling", layer, lambda p: pooling_of(self._structs, p)),
            self._state(state),
            self._cell_rows(batch),
            self._batch_of(batch, first, layer.rotary_dim // 2),
            self._plane(plane),
            self._floats(values, shape, "values"),
            self._floats(gates, shape, "gates"),
        )

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
        rows = len(batch.positions)
        _check_plane(plane, layer.head_dim, layer.stride)
        self._do(
            "colibri_select_entries",
            self._structs.made("colibri_entry_indexer", layer, _indexer),
            self._batch_of(batch, rope, layer.rotary_dim // 2),
            self._plane(plane),
            self._floats(q, (rows, layer.num_heads * layer.head_dim), "q"),
            self._floats(weights, (rows, layer.num_heads), "weights"),
            self._ints(selected, (rows, layer.top_k), "selected"),
        )

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
        """See `SharedKeyKernels.shared_key_attention`; the result takes the place of q."""
        rows = len(batch.positions)
        _check_cache(layer, cache)
        c_state = self._structs.made("colibri_shared_key_state", cache, self._cache)
        c_state.rows = self._cell_rows(batch)
        c_state.selected = (
            self._library.ffi.NULL
            if selected is None
            else self._ints(selected, (rows, layer.top_k or 0), "selected")
        )
        self._do(
            "colibri_shared_key_rows",
            self._structs.made("colibri_shared_key", layer, self._shared_key),
            self._batch_of(batch, rope, layer.rotary_dim // 2),
            c_state,
            self._floats(q, (rows, layer.num_heads * layer.head_dim), "q"),
            self._floats(k, (rows, layer.head_dim), "k"),
        )
        return q

    def matmul_groups(self, matrix: Matrix, num_groups: int, x: Floats) -> Floats:
        """See `SharedKeyKernels.matmul_groups`."""
        c_x = self._floats(x, (-1, num_groups * matrix.columns), "x")
        out = np.empty((len(x), matrix.rows), np.float32)
        c_matrix = self._structs.matrix(matrix)
        self._do("colibri_matmul_groups", c_matrix, num_groups, c_x, len(x), self._out(out))
        return out

    def read_streams(self, mix: StreamMix, x: Floats) -> tuple[Floats, Floats]:
        """See `StreamKernels.read_streams`."""
        rows = len(x)
        c_x = self._floats(x, (rows, mix.fn.columns), "x")
        weights = np.empty((rows, mix.fn.rows), np.float32)
        out = np.empty((rows, mix.fn.columns // mix.num_streams), np.float32)
        c_mix = self._structs.made("colibri_stream_mix", mix, self._stream_mix)
        c_weights, c_out = self._out(weights), self._out(out)
        self._do("colibri_read_streams", c_mix, c_x, rows, c_weights, c_out)
        return out, weights

    def write_streams(self, mix: StreamMix, weights: Floats, y: Floats, x: Floats) -> None:
        """See `StreamKernels.write_streams`."""
        rows, width = len(x), mix.fn.columns // mix.num_streams
        self._do(
            "colibri_write_streams",
            self._structs.made("colibri_stream_mix", mix, self._stream_mix),
            self._floats(weights, (rows, mix.fn.rows), "weights"),
            self._floats(y, (rows, width), "y"),
            rows,
            width,
            self._floats(x, (rows, mix.fn.columns), "x"),
        )

    def _plane(self, plane: KVPlane) -> Any:
        return self._structs.made("colibri_plane", plane, lambda p: plane_of(self._structs, p))

    def _shared_key(self, a: SharedKeyAttention) -> dict[str, Any]:
        if a.head_dim > _MOST_KEY or not 0 <= a.rotary_dim <= min(a.head_dim, _MOST_ROPE_DIM):
            raise ValueError(f"a key of {a.head_dim} that rotates {a.rotary_dim} is too large")
        plain = ("num_heads", "head_dim", "rotary_dim", "window", "scale")
        return {
            **{name: getattr(a, name) for name in plain},
            "sinks": self._floats(a.sinks, (a.num_heads,), "sinks"),
            "top_k": a.top_k or 0,
        }

    def _cache(self, cache: SharedKeyCache) -> dict[str, Any]:
        entry = {} if cache.entry is None else {"entry": plane_of(self._structs, cache.entry)}
        key = {
            "cells": cell_layer_of(self._structs, cache.key.cells),
            "format": cache.key.format.code,
            "width": cache.key.width,
            "positions": cache.key.positions,
        }
        return {"key": key, **entry}

    def _stream_mix(self, mix: StreamMix) -> dict[str, Any]:
        n = mix.num_streams
        rows, scales = (n, 1) if mix.reads_only else (stream_weights(n), 3)
        if not 1 <= n <= _MOST_STREAMS or mix.fn.rows != rows or mix.fn.columns % n:
            raise ValueError(f"{n} streams cannot be mixed by [{mix.fn.rows}, {mix.fn.columns}]")
        return {
            "fn": self._structs.matrix(mix.fn)[0],
            "base": self._floats(mix.base, (rows,), "base"),
            "scale": self._floats(mix.scale, (scales,), "scale"),
            "num_streams": n,
            "iterations": mix.iterations,
            "norm_eps": mix.norm_eps,
            "eps": mix.eps,
        }


def _indexer(i: EntryIndexer) -> dict[str, Any]:
    if i.num_heads > _MOST_INDEX_HEADS or i.head_dim > _MOST_INDEX_DIM:
        raise ValueError(f"{i.num_heads} index heads of {i.head_dim} are too large")
    if i.rotary_dim % 2 or i.rotary_dim > i.head_dim:
        raise ValueError(f"rotary_dim {i.rotary_dim} must be even, at most {i.head_dim}")
    return {n: getattr(i, n) for n in ("num_heads", "head_dim", "rotary_dim", "top_k", "scale")}


def _check_cache(layer: SharedKeyAttention, cache: SharedKeyCache) -> None:
    key, least = cache.key, layer.window + WINDOW_SLACK
    nbytes = key.format.nbytes((key.positions, key.width))
    if key.width != layer.head_dim or key.positions < least or nbytes > key.cells.nbytes:
        raise ValueError(f"the cells keep {key}, wanted {least} rows of {layer.head_dim}")
    if (cache.entry is None) != (layer.stride == 0):
        raise ValueError(f"entries of {layer.stride} positions, but the pool keeps {cache.entry}")
    if cache.entry is not None:
        _check_plane(cache.entry, layer.head_dim, layer.stride)


def _check_plane(plane: KVPlane, width: int, stride: int) -> None:
    if (plane.heads, plane.width, plane.stride) != (1, width, stride):
        raise ValueError(f"the pool keeps {plane}, wanted one head of {width}, stride {stride}")
    if KV_BLOCK % stride and stride % KV_BLOCK:
        raise ValueError(f"{stride} positions neither divide a block nor make up several")
    nbytes = plane.format.nbytes((max(1, KV_BLOCK // stride), width))
    if plane.offset < 0 or plane.offset + nbytes > plane.block_nbytes:
        raise ValueError(f"{nbytes} bytes do not fit a block of {plane.block_nbytes}")
