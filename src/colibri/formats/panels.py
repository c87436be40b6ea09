"""Eight rows of codes interleaved: the layout in which kernels read integer-coded matrices.

Chunks of 32 bytes, in which lane r holds four bytes of row r: for codes of 8 bits `w[4c..4c+3]`;
for codes of 4 bits the low nibbles are `w[8c..8c+3]` and the high ones `w[8c+4..8c+7]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.formats.base import PANEL_ROWS, Bytes


def pair_nibbles(codes: Bytes) -> Bytes:
    """Codes `[N, K]` below 16 to bytes `[N, K/2]`, the even k in the low nibble."""
    return np.asarray(codes[:, 0::2] | (codes[:, 1::2] << 4))


def interleave(stored: Bytes, bits: int) -> Bytes:
    """Rows of codes `[N, bytes]`, N a multiple of 8, to chunks `[N/8, chunks, 8 lanes, 4]`."""
    if bits == 4:
        nibbles = np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:1], -1, 2, 4)
        stored = (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).reshape(stored.shape)
    return stored.reshape(-1, PANEL_ROWS, stored.shape[1] // 4, 4).transpose(0, 2, 1, 3)


def deinterleave(chunks: Bytes, bits: int) -> Bytes:
    """Panels of chunks `[N/8, bytes]` to codes `[N/8, 8, K]`, one a byte."""
    panels = len(chunks)
    by_row = np.ascontiguousarray(chunks.reshape(panels, -1, PANEL_ROWS, 4).transpose(0, 2, 1, 3))
    if bits == 4:
        by_row = np.stack([by_row & 15, by_row >> 4], 3)
    return by_row.reshape(panels, PANEL_ROWS, -1)


def to_lanes(values: NDArray[np.generic]) -> Bytes:
    """Numbers `[N, n]`, N a multiple of 8, to panels `[N/8, bytes]`: `[n] x 8 lanes`."""
    panels = len(values) // PANEL_ROWS
    by_panel = values.reshape(panels, PANEL_ROWS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(by_panel).reshape(panels, -1).view(np.uint8)


def from_lanes(
    panels: Bytes, counts: Sequence[tuple[int, np.dtype[Any]]]
) -> tuple[list[NDArray[Any]], Bytes]:
    """Undo `to_lanes` for numbers that follow each other; also what comes behind them."""
    found, at = [], 0
    for count, dtype in counts:
        end = at + count * PANEL_ROWS * dtype.itemsize
        part = np.ascontiguousarray(panels[:, at:end]).view(dtype)
        by_row = part.reshape(len(panels), count, PANEL_ROWS).transpose(0, 2, 1)
        found.append(np.ascontiguousarray(by_row).reshape(-1, count))
        at = end
    return found, np.ascontiguousarray(panels[:, at:])
