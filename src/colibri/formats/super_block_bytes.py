"""The bytes of ggml's blocks of 256 weights that have a resident format of their own.

q4_k, 144 bytes: float16 `d` and `dmin`; twelve bytes of eight scales and eight minima, six bits
each; 128 bytes of codes, of which 32 hold a group of 32 weights in their low and the next in their
high nibbles. q6_k, 210 bytes: 128 bytes of low nibbles, 64 bytes of upper pairs of bits, sixteen
int8 scales, float16 `d`; both halves of a block alike: 64 low nibbles of bytes, then their high
ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.formats.base import Bytes


class Q4K(NamedTuple):
    """Fields of blocks `[N, B]`: `d` and `dmin` as bits, scales and minima `[.., 8]`, codes."""

    d: NDArray[np.uint16]
    dmin: NDArray[np.uint16]
    scales: Bytes
    minima: Bytes
    codes: Bytes


class Q6K(NamedTuple):
    """Fields of blocks `[N, B]`: `d` as bits, scales `[.., 16]` as bytes, codes `[.., 256]`."""

    d: NDArray[np.uint16]
    scales: Bytes
    codes: Bytes


def halves(blocks: Bytes, at: int) -> NDArray[np.uint16]:
    """The 16 bits at byte `at` of blocks `[N, B, nbytes]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.uint16)[..., 0]


def split_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima `[.., 8]` out of twelve bytes of six bits."""
    low, high = packed[..., :8], packed[..., 8:]
    upper = low >> 6
    first = low & 63
    scales = np.concatenate([first[..., :4], high & 15 | upper[..., :4] << 4], axis=-1)
    minima = np.concatenate([first[..., 4:], high >> 4 | upper[..., 4:] << 4], axis=-1)
    return scales, minima


def join_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """What `split_scales` takes apart."""
    low = np.concatenate([scales[..., :4], minima[..., :4]], axis=-1)
    upper = np.concatenate([scales[..., 4:], minima[..., 4:]], axis=-1) >> 4
    high = scales[..., 4:] & 15 | minima[..., 4:] << 4
    return np.concatenate([low | upper << 6, high], axis=-1)


def split_nibbles(packed: Bytes, width: int) -> Bytes:
    """Codes of bytes `[.., n]`: of `width` at a time the low nibbles, then the high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, width)
    both = np.concatenate([runs & 15, runs >> 4], axis=-2)
    return both.reshape(*packed.shape[:-1], -1)


def join_nibbles(codes: Bytes, width: int) -> Bytes:
    """What `split_nibbles` takes apart."""
    runs = codes.reshape(*codes.shape[:-1], -1, 2, width)
    pairs = np.asarray(runs[..., 0, :] | runs[..., 1, :] << 4, np.uint8)
    return pairs.reshape(*codes.shape[:-1], -1)


def split_q4_k(blocks: Bytes) -> Q4K:
    """Blocks `[N, B, 144]` to their fields."""
    scales, minima = split_scales(blocks[..., 4:16])
    codes = split_nibbles(blocks[..., 16:], 32)
    return Q4K(halves(blocks, 0), halves(blocks, 2), scales, minima, codes)


def join_q4_k(fields: Q4K) -> Bytes:
    """Blocks `[N, B, 144]` of their fields."""
    heads = np.stack([fields.d, fields.dmin], axis=-1).view(np.uint8)
    codes = join_nibbles(fields.codes.reshape(*fields.d.shape, 256), 32)
    return np.concatenate([heads, join_scales(fields.scales, fields.minima), codes], axis=-1)


def split_q6_k(blocks: Bytes) -> Q6K:
    """Blocks `[N, B, 210]` to their fields."""
    shape = blocks.shape[:-1]
    low = split_nibbles(blocks[..., :128], 64)  # of a half: 64 low nibbles, then 64 high ones
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = (high >> shifts & 3).reshape(*shape, 256)
    return Q6K(halves(blocks, 208), blocks[..., 192:208], np.asarray(low | upper << 4, np.uint8))


def join_q6_k(fields: Q6K) -> Bytes:
    """Blocks `[N, B, 210]` of their fields."""
    codes = fields.codes.reshape(*fields.d.shape, 256)
    quarters = (codes >> 4).reshape(*fields.d.shape, 2, 4, 32)
    high = quarters[..., 0, :] | quarters[..., 1, :] << 2 | quarters[..., 2, :] << 4
    high |= quarters[..., 3, :] << 6
    low, upper = (
        join_nibbles(np.asarray(codes & 15, np.uint8), 64),
        high.reshape(*fields.d.shape, 64),
    )
    tail = np.ascontiguousarray(fields.d[..., None]).view(np.uint8)
    return np.concatenate([low, upper, fields.scales, tail], axis=-1)
