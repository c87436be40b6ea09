"""Random matrices as checkpoints publish them: which tensors each has, and what is drawn for them.

The counterpart of `storage`, which reads them: bf16 and its kin, fp8 with block scales, packed int4
(compressed-tensors), mxfp4 as gpt-oss (`_blocks`, all experts together) and DeepSeek store it.
Codes are drawn from a table of 256 bytes that, taken evenly, are normal; nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from colibri.checkpoint.random_weights import BIAS_STD, SCALE_SPREAD, code_table, random_matrix
from colibri.checkpoint.safetensors_writer import DTYPE_OF_FORMAT
from colibri.errors import UnsupportedModelError
from colibri.formats import (
    BF16,
    F32,
    Bytes,
    FloatFormat,
    Format,
    FP8Format,
    IntegerFormat,
    MXFP4Format,
    Shape,
)
from colibri.formats.fp8 import E4M3, LARGEST, round_e4m3
from colibri.formats.microscaling import E2M1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a matrix `[N, K]`.

    Attributes:
        tail: behind the matrix's name without `.weight`.
        dtype: as safetensors spells it.
        rows: of the tensor.
        row: the shape of one row.
        row_nbytes: bytes of one row.
        row_of: rows of the matrix that belong to a row of the tensor; 0 where rows do not matter.
    """

    tail: str
    dtype: str
    rows: int
    row: tuple[int, ...]
    row_nbytes: int
    row_of: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        return (self.rows, *self.row)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.rows * self.row_nbytes


def tensors_of(
    fmt: Format, shape: Shape, *, fused: bool = False, biased: bool = False
) -> tuple[StoredTensor, ...]:
    """The tensors of a matrix in that format: codes first, a bias last.

    `fused` says that one tensor holds the matrices of all experts.

    Raises:
        UnsupportedModelError: no checkpoint is published so.
    """
    rows, columns = shape
    weight, tail = ("", "_bias") if fused else (".weight", ".bias")
    if isinstance(fmt, FloatFormat):
        size = fmt.dtype.itemsize
        dtype = DTYPE_OF_FORMAT[fmt.name]
        found = [StoredTensor(weight, dtype, rows, (columns,), columns * size)]
    elif isinstance(fmt, FP8Format):
        found = _fp8(fmt, rows, columns, weight)
    elif isinstance(fmt, MXFP4Format):
        found = _mxfp4(rows, columns, fused)
    elif isinstance(fmt, IntegerFormat) and fmt.bits == 4 and fmt.scale is BF16 and not fused:
        found = _packed(fmt, rows, columns)
    else:
        spelled = "for all experts together" if fused else "expert by expert"
        raise UnsupportedModelError(f"{fmt} is not published {spelled}")
    kind = fmt if isinstance(fmt, FloatFormat) else BF16
    bias = StoredTensor(tail, DTYPE_OF_FORMAT[kind.name], rows, (), kind.dtype.itemsize)
    return (*found, *([bias] if biased else []))


def _fp8(fmt: FP8Format, rows: int, columns: int, weight: str) -> list[StoredTensor]:
    down, along = -(-rows // fmt.block), -(-columns // fmt.block)
    codes = StoredTensor(weight, "F8_E4M3", rows, (columns,), columns)
    scales = StoredTensor(f"{weight}_scale_inv", "F32", down, (along,), 4 * along, fmt.block)
    return [codes, scales]


def _mxfp4(rows: int, columns: int, fused: bool) -> list[StoredTensor]:
    groups, half = columns // 32, columns // 2
    if fused:
        blocks = StoredTensor("_blocks", "U8", rows, (groups, 16), half)
        return [blocks, StoredTensor("_scales", "U8", rows, (groups,), groups)]
    codes = StoredTensor(".weight", "I8", rows, (half,), half)
    return [codes, StoredTensor(".scale", "F8_E8M0", rows, (groups,), groups)]


def _packed(fmt: IntegerFormat, rows: int, columns: int) -> list[StoredTensor]:
    groups = columns // fmt.group
    return [
        StoredTensor(".weight_packed", "I32", rows, (columns // 8,), columns // 2),
        StoredTensor(".weight_scale", "BF16", rows, (groups,), 2 * groups),
        StoredTensor(".weight_shape", "I32", 2, (), 4, 0),
    ]


def draw(
    fmt: Format,
    shape: Shape,
    tensor: StoredTensor,
    rng: np.random.Generator,
    std: float,
    drawn_rows: int | None = None,
) -> Bytes:
    """The bytes of one of `tensors_of(fmt, shape)` of a normal matrix of that deviation.

    Rows from `drawn_rows` on are zero.
    """
    drawn = shape[0] if drawn_rows is None else min(drawn_rows, shape[0])
    if tensor.tail.endswith("bias"):
        kind = fmt if isinstance(fmt, FloatFormat) else BF16
        return random_matrix(kind, (1, tensor.rows), rng, BIAS_STD)
    if isinstance(fmt, FloatFormat):
        return random_matrix(fmt, shape, rng, std, drawn)
    if tensor.tail == ".weight_shape":
        return np.array(shape, "<i4").view(np.uint8)
    table, deviation, zero = _codes(fmt)
    if tensor.row_nbytes * 2 >= shape[1]:  # codes of at least four bits
        codes = table[rng.integers(0, 256, (tensor.rows, tensor.row_nbytes), np.uint8)]
        codes[drawn:] = zero
        return np.asarray(codes.reshape(-1))
    return _scales(fmt, tensor, rng, std / deviation)


def _scales(fmt: Format, tensor: StoredTensor, rng: np.random.Generator, factor: float) -> Bytes:
    """Around `factor`; powers of two are as often too large as they have to be."""
    count = tensor.rows * tensor.row[0]
    if isinstance(fmt, MXFP4Format):
        low = int(np.floor(np.log2(factor)))
        share = (factor**2 / 4.0**low - 1) / 3
        return np.asarray((127 + low + (rng.random(count) < share)).astype(np.uint8))
    kind = F32 if isinstance(fmt, FP8Format) else BF16
    values = factor * rng.uniform(1 - SCALE_SPREAD, 1 + SCALE_SPREAD, count)
    return kind.encode(values.astype(np.float32))


@cache
def _codes(fmt: Format) -> tuple[Bytes, float, int]:
    """256 bytes that, drawn evenly, hold normal codes; their deviation; the byte of zeros."""
    if isinstance(fmt, IntegerFormat):
        table, deviation = code_table(fmt.bits)
        return table, deviation, 0x88
    if isinstance(fmt, MXFP4Format):
        quantiles = _quantiles(16)
        wanted = quantiles * (float(E2M1.max()) / quantiles.max())
        codes = np.abs(wanted[:, None] - E2M1[None, :]).argmin(axis=1).astype(np.uint8)
        pairs = codes[None, :] | (codes[:, None] << 4)
        return pairs.reshape(-1), float(E2M1[codes].std()), 0
    quantiles = _quantiles(256)
    bytes_ = round_e4m3((quantiles * (LARGEST / quantiles.max())).astype(np.float32))
    return bytes_, float(E4M3[bytes_].std()), 0


def _quantiles(count: int) -> np.ndarray:
    """Evenly spaced quantiles of a normal distribution."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
