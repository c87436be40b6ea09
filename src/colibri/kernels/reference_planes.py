"""Planes of the pool in NumPy: entries of one head, written and read; and the best of scores."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats, RowInt8Format
from colibri.kernels.api import KV_BLOCK, Batch, Ints, KVPlane
from colibri.kernels.shared_key import CellWindow


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
    return np.asarray(wide, np.float32).reshape(len(blocks) * KV_BLOCK, plane.width)[:length]


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


def write_window(window: CellWindow, batch: Batch, rows: slice, values: Floats) -> None:
    """Round `values [R, width]` into the window's rows of the batch's `rows`."""
    slots = batch.positions[rows] % window.positions
    cells = batch.cells[batch.members[rows]]
    for cell, slot, value in zip(cells.tolist(), slots.tolist(), values, strict=True):
        items, scales = _window_views(window, cell)
        if isinstance(window.format, RowInt8Format):
            items[slot], scales[slot] = window.format.round(value)
        else:
            items[slot] = window.format.from_float32(value)


def read_window(window: CellWindow, cell: int, first: int, last: int) -> Floats:
    """Positions `first` to `last`, `[n, width]`."""
    slots = np.arange(first, last + 1) % window.positions
    items, scales = _window_views(window, cell)
    if isinstance(window.format, RowInt8Format):
        return np.asarray(items[slots].astype(np.float32) * scales[slots, None], np.float32)
    return window.format.to_float32(items[slots])


def _window_views(window: CellWindow, cell: int) -> tuple[Floats, Floats]:
    """Items `[positions, width]` and, for int8, scales `[positions]`."""
    layer, fmt = window.cells, window.format
    start = cell * layer.cell_nbytes + layer.offset
    own = layer.pool[start : start + fmt.nbytes((window.positions, window.width))]
    dtype = np.dtype(np.int8) if isinstance(fmt, RowInt8Format) else fmt.dtype
    size = window.positions * window.width * dtype.itemsize
    items = own[:size].view(dtype).reshape(window.positions, window.width)
    return items, own[size:].view(np.float32)
