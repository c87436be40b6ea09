"""The block types of GGUF files, and how each becomes resident without a change of its numbers.

A row of K weights is K / block blocks of bytes, one after another; K is a multiple of the block,
files are never padded. Numbers and layouts are those of ggml; `BlockType.read` gives what the
resident format takes as stored. native/pack_blocks.c is the twin.

| type | resident as |
|---|---|
| q4_0, q8_0, mxfp4 | int4-g32, int8-g32, mxfp4: the same codes and scales |
| q4_k, q6_k | themselves, eight rows interleaved |
| q4_1, q5_0, q5_1, q5_k, iq4_nl | int8-g32-affine |
| q2_k, q3_k | int8-g16-affine |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.formats.affine import AFFINE_G16, AFFINE_G32, AffineFormat
from colibri.formats.base import PANEL_ROWS, Bytes, Floats, Format, Shape, padded
from colibri.formats.integer import INT4_G32, INT8_G32
from colibri.formats.microscaling import MXFP4
from colibri.formats.panels import pair_nibbles
from colibri.formats.super_block_bytes import halves, split_nibbles, split_scales
from colibri.formats.super_blocks import Q4_K, Q6_K

_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


class BlockType(NamedTuple):
    """One type.

    Attributes:
        name: as everywhere: `q4_0`.
        number: of the type in a file.
        block: weights of a block.
        nbytes: bytes of a block.
        format: the resident format that holds exactly its numbers.
        read: blocks `[N, B, nbytes]`, N a multiple of 8, to what `format.pack` takes.
    """

    name: str
    number: int
    block: int
    nbytes: int
    format: Format
    read: Callable[[Bytes], Bytes]

    @property
    def dtype(self) -> str:
        """How tensors of this type are told."""
        return self.name.upper()

    def row_nbytes(self, columns: int) -> int:
        """Bytes of a row of K weights, a multiple of the block."""
        return columns // self.block * self.nbytes

    def resident(self, rows: Bytes, shape: Shape) -> Bytes:
        """Rows `[N, row_nbytes]` as resident bytes of `[N, K]`."""
        full = np.zeros((padded(shape[0], PANEL_ROWS), rows.shape[1]), np.uint8)
        full[: shape[0]] = rows
        return self.format.pack(self.read(full.reshape(len(full), -1, self.nbytes)), shape)

    def decode(self, rows: Bytes, shape: Shape) -> Floats:
        """The numbers `[N, K]` of rows `[N, row_nbytes]`."""
        return self.format.decode(self.resident(rows, shape), shape)


def _floats(blocks: Bytes, at: int) -> Floats:
    return halves(blocks, at).view(np.float16).astype(np.float32)


def _paired(blocks: Bytes, at: int) -> Bytes:
    """Codes `[N, K]` of 16 bytes at byte `at`: first their low nibbles, then the high ones."""
    return split_nibbles(blocks[..., at : at + 16], 16).reshape(len(blocks), -1)


def _fifth(blocks: Bytes, at: int) -> Bytes:
    """The fifth bits `[N, K]`, in place, of 32 codes: one 32-bit word at byte `at`."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    return np.asarray(bits.reshape(len(blocks), -1) << 4, np.uint8)


def _affine(
    fmt: AffineFormat, codes: NDArray[np.integer[Any]], scales: Floats, minima: Floats | None = None
) -> Bytes:
    scales = scales.reshape(len(codes), -1)
    minima = np.zeros_like(scales) if minima is None else minima.reshape(len(codes), -1)
    return fmt.join(np.ascontiguousarray(codes, np.uint8).view(np.int8), scales, minima)


def _q4_0(blocks: Bytes) -> Bytes:
    scales = np.ascontiguousarray(blocks[..., :2]).reshape(-1)
    return np.concatenate([pair_nibbles(_paired(blocks, 2)).reshape(-1), scales])


def _q8_0(blocks: Bytes) -> Bytes:
    return np.concatenate([blocks[..., 2:].reshape(-1), blocks[..., :2].reshape(-1)])


def _mxfp4(blocks: Bytes) -> Bytes:
    return np.concatenate(
        [pair_nibbles(_paired(blocks, 1)).reshape(-1), blocks[..., 0].reshape(-1)]
    )


def _q4_1(blocks: Bytes) -> Bytes:
    return _affine(AFFINE_G32, _paired(blocks, 4), _floats(blocks, 0), _floats(blocks, 2))


def _q5_0(blocks: Bytes) -> Bytes:
    codes = (_paired(blocks, 6) | _fifth(blocks, 2)) - np.uint8(16)
    return _affine(AFFINE_G32, codes, _floats(blocks, 0))


def _q5_1(blocks: Bytes) -> Bytes:
    codes = _paired(blocks, 8) | _fifth(blocks, 4)
    return _affine(AFFINE_G32, codes, _floats(blocks, 0), _floats(blocks, 2))


def _iq4_nl(blocks: Bytes) -> Bytes:
    return _affine(AFFINE_G32, _IQ4_NL[_paired(blocks, 2)].view(np.uint8), _floats(blocks, 0))


def _q5_k(blocks: Bytes) -> Bytes:
    small, minima = split_scales(blocks[..., 4:16])
    low = split_nibbles(blocks[..., 48:], 32).reshape(*blocks.shape[:2], 8, 32)
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    scale, minimum = _floats(blocks, 0)[..., None] * small, _floats(blocks, 2)[..., None] * minima
    return _affine(AFFINE_G32, (low | bits << 4).reshape(len(blocks), -1), scale, -minimum)


def _quarters(blocks: Bytes, at: int) -> Bytes:
    """Two-bit codes `[N, B, 8, 32]` of 64 bytes at byte `at`: by halves, then by pairs of bits."""
    runs = blocks[..., at : at + 64].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = np.asarray(runs >> shifts & 3, np.uint8)
    return codes.reshape(*blocks.shape[:2], 8, 32)


def _q2_k(blocks: Bytes) -> Bytes:
    codes = _quarters(blocks, 16).reshape(len(blocks), -1)
    scale = _floats(blocks, 80)[..., None] * (blocks[..., :16] & 15)
    return _affine(
        AFFINE_G16, codes, scale, -(_floats(blocks, 82)[..., None] * (blocks[..., :16] >> 4))
    )


def _q3_k(blocks: Bytes) -> Bytes:
    bits = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = (_quarters(blocks, 32) | bits << 2) - np.uint8(4)
    low = split_nibbles(blocks[..., 96:104], 8)  # [N, B, 16]
    high = blocks[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    small = (low | high.reshape(low.shape) << 4).astype(np.float32) - 32
    return _affine(
        AFFINE_G16, codes.reshape(len(blocks), -1), _floats(blocks, 108)[..., None] * small
    )


def _itself(blocks: Bytes) -> Bytes:
    return blocks.reshape(-1)


BLOCK_TYPES = (
    BlockType("q4_0", 2, 32, 18, INT4_G32, _q4_0),
    BlockType("q4_1", 3, 32, 20, AFFINE_G32, _q4_1),
    BlockType("q5_0", 6, 32, 22, AFFINE_G32, _q5_0),
    BlockType("q5_1", 7, 32, 24, AFFINE_G32, _q5_1),
    BlockType("q8_0", 8, 32, 34, INT8_G32, _q8_0),
    BlockType("q2_k", 10, 256, 84, AFFINE_G16, _q2_k),
    BlockType("q3_k", 11, 256, 110, AFFINE_G16, _q3_k),
    BlockType("q4_k", 12, 256, 144, Q4_K, _itself),
    BlockType("q5_k", 13, 256, 176, AFFINE_G32, _q5_k),
    BlockType("q6_k", 14, 256, 210, Q6_K, _itself),
    BlockType("iq4_nl", 20, 32, 18, AFFINE_G32, _iq4_nl),
    BlockType("mxfp4", 39, 32, 17, MXFP4, _mxfp4),
)
BY_NUMBER = {each.number: each for each in BLOCK_TYPES}
BY_DTYPE = {each.dtype: each for each in BLOCK_TYPES}
