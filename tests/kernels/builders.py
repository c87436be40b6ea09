"""Small weights, arenas and K/V pools for the kernel tests, and the kernels under test."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.formats import (
    F32,
    FORMATS,
    Bytes,
    FloatFormat,
    Floats,
    Format,
    FP8Format,
    RowInt8Format,
    padded,
)
from colibri.kernels.api import (
    FFN,
    KV_BLOCK,
    READY,
    Activations,
    Attention,
    Batch,
    ExpertPart,
    Experts,
    Ints,
    KVLayer,
    Limits,
    Matrix,
    Norm,
    RopeTable,
    Router,
    Routing,
    Slots,
)
from colibri.kernels.latent import LatentLimits
from colibri.kernels.native import NativeKernels, instruction_sets
from colibri.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
FORMAT_NAMES = list(FORMATS)
CODED_NAMES = [name for name, fmt in FORMATS.items() if fmt.is_coded]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33)
LIMITS = Limits(
    rows=1200,
    hidden_size=300,
    attention_width=16384,
    intermediate_size=300,
    num_experts=32,
    num_experts_per_tok=32,
    vocab_size=300,
    latent=LatentLimits(
        heads=40,
        q_rank=40,
        head_dim=56,
        rank=80,
        key=112,
        index_heads=40,
        index_dim=48,
        index_positions=5120,
    ),
)


@cache
def native(activations: str = "int16", threads: int = 1, isa: str | None = None) -> NativeKernels:
    kernels = NativeKernels(threads=threads, activations=Activations(activations), isa=isa)
    kernels.reserve(LIMITS)
    return kernels


def variants(activations: str) -> Iterator[NativeKernels]:
    """Everything that owes the same bits: other instruction sets, other numbers of threads."""
    for isa in instruction_sets():
        yield native(activations, 1, isa)
    for threads in (2, 3):
        yield native(activations, threads)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaussian(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def shifted(data: Bytes, by: int) -> Bytes:
    """The same bytes at an address that is a multiple of nothing."""
    memory = np.zeros(data.size + by, np.uint8)
    memory[by:] = data
    return memory[by:]


def coded(fmt: Format, weights: Floats) -> Bytes:
    shape = (weights.shape[0], weights.shape[1])
    return np.ascontiguousarray(fmt.pack(fmt.encode(weights), shape))


def matrix(
    rng: np.random.Generator,
    fmt: Format,
    rows: int,
    columns: int,
    bias: bool = False,
    shift: int = 1,
) -> Matrix:
    weights = gaussian(rng, rows, columns) / np.float32(np.sqrt(columns))
    data = shifted(coded(fmt, weights), shift)
    return Matrix(fmt, rows, columns, data, gaussian(rng, rows) if bias else None)


def norm(rng: np.random.Generator, width: int) -> Norm:
    return Norm(np.float32(1) + gaussian(rng, width) / np.float32(8), 1e-6)


def glu(rng: np.random.Generator, fmt: Format, hidden: int, units: int, normed: bool) -> FFN:
    return FFN(
        matrix(rng, fmt, units, hidden),
        matrix(rng, fmt, units, hidden),
        matrix(rng, fmt, hidden, units),
        norm(rng, hidden) if normed else None,
    )


def attention(
    rng: np.random.Generator,
    fmt: Format = F32,
    hidden: int = 24,
    kv_heads: int = 1,
    ratio: int = 2,
    head_dim: int = 16,
    bias: bool = False,
    q_norm: str | None = None,
    sinks: bool = False,
    gated: bool = False,
    **options: Any,
) -> Attention:
    heads = kv_heads * ratio
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    whole = q_norm == "whole"
    return Attention(
        norm=norm(rng, hidden),
        q_proj=matrix(rng, fmt, 2 * q_width if gated else q_width, hidden, bias),
        k_proj=matrix(rng, fmt, kv_width, hidden, bias),
        v_proj=matrix(rng, fmt, kv_width, hidden, bias),
        o_proj=matrix(rng, fmt, hidden, q_width),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        q_norm=norm(rng, q_width if whole else head_dim) if q_norm else None,
        k_norm=norm(rng, kv_width if whole else head_dim) if q_norm else None,
        sinks=gaussian(rng, heads) if sinks else None,
        gated=gated,
        **{"rotary_dim": head_dim} | options,
    )


def rope(positions: Ints, rotary_dim: int) -> RopeTable:
    angles = positions[:, None] / 10000.0 ** (np.arange(rotary_dim // 2) * 2 / max(rotary_dim, 1))
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def kv_layer(layer: Attention, fmt: FloatFormat | RowInt8Format, num_blocks: int) -> KVLayer:
    """A pool full of NaN: whoever reads a key that was never written shows it."""
    share = 2 * fmt.nbytes((layer.num_kv_heads * KV_BLOCK, layer.head_dim))
    pool = np.full(num_blocks * (share + 128), 0xFF, np.uint8)
    return KVLayer(pool, fmt, share + 128, 64, layer.num_kv_heads, layer.head_dim)


def batch(positions: list[int], members: list[int], tables: Ints) -> Batch:
    return Batch(np.array(positions, np.int32), np.array(members, np.int32), tables)


def router(
    rng: np.random.Generator,
    fmt: Format,
    hidden: int,
    num: int,
    active: int,
    normalize: bool,
    **options: Any,
) -> Router:
    return Router(norm(rng, hidden), matrix(rng, fmt, num, hidden), active, normalize, **options)


def routing(rng: np.random.Generator, tokens: int, hidden: int, num: int, active: int) -> Routing:
    ids = np.array([rng.permutation(num)[:active] for _ in range(tokens)], np.int32)
    weights = rng.random((tokens, active), np.float32)
    return Routing(gaussian(rng, tokens, hidden), ids, weights, np.unique(ids))


def experts(
    rng: np.random.Generator, fmt: Format, hidden: int, units: int, num: int, shared: bool = False
) -> tuple[Experts, Slots]:
    """A layer and an arena with all its experts; expert e lies in slot `num - 1 - e`.

    Gate and up panels alternate where every panel is whole; else the parts follow each other.
    """
    panel = fmt.panel_nbytes(hidden)
    alternate = fmt.is_coded or (units % 8 == 0 and not isinstance(fmt, FP8Format))
    stride = 2 * panel if alternate else panel
    layer = Experts(
        num,
        ExpertPart("gate_proj", fmt, units, hidden, stride),
        ExpertPart("up_proj", fmt, units, hidden, stride),
        ExpertPart("down_proj", fmt, hidden, units, fmt.panel_nbytes(units)),
        shared=glu(rng, fmt, hidden, units, normed=False) if shared else None,
        shared_gate=matrix(rng, F32, 1, hidden) if shared else None,
    )
    first = fmt.resident_nbytes((units, hidden))
    down = fmt.resident_nbytes((hidden, units))
    record = padded(2 * first + down + 3, 4)
    arena = np.zeros(num * record, np.uint8)
    parts = np.zeros((num, 3), np.int64)
    for slot in range(num):
        start = slot * record + 1
        parts[slot] = start, start + (panel if alternate else first), start + 2 * first
        for i, shape in enumerate(((units, hidden), (units, hidden), (hidden, units))):
            data = coded(fmt, gaussian(rng, *shape) / np.float32(np.sqrt(shape[1])))
            size = fmt.panel_nbytes(shape[1])
            step = stride if i < 2 else size
            for p, at in enumerate(range(0, data.size, size)):
                chunk = data[at : at + size]
                begin = parts[slot, i] + p * step
                arena[begin : begin + chunk.size] = chunk
    states = np.full(num, READY, np.int32)
    return layer, Slots(arena, parts, states, lambda slot: None)


def with_biases(rng: np.random.Generator, layer: Experts, table: Slots) -> Slots:
    """The same experts, each followed in the arena by biases of its own."""
    rows = (layer.gate_proj.rows, layer.up_proj.rows, layer.down_proj.rows)
    starts = np.cumsum([0, *rows])[:3]
    values = gaussian(rng, layer.num_experts, sum(rows))
    begin = padded(table.arena.size, 4)
    arena = np.zeros(begin + values.nbytes, np.uint8)
    arena[: table.arena.size] = table.arena
    arena[begin:] = values.reshape(-1).view(np.uint8)
    offsets = begin + 4 * (np.arange(layer.num_experts)[:, None] * sum(rows) + starts)
    return Slots(arena, table.parts, table.states, table.wait, offsets.astype(np.int64))


def slots_of(layer: Experts, ids: Ints) -> Ints:
    return (layer.num_experts - 1 - ids).astype(np.int32)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(np.uint32)


def assert_same_bits(found: Floats, wanted: Floats) -> None:
    np.testing.assert_array_equal(bits(found), bits(wanted))


def assert_close(found: Floats, wanted: Floats, error: float) -> None:
    """The largest deviation, in units of the largest wanted value."""
    largest = float(np.abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error * largest + 1e-12)


ERROR = {"float32": 4e-6, "int16": 3e-4, "int8": 6e-2}
