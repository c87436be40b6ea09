"""One token's attention over a long context, for many layers whose keys no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from colibri.formats import BF16, Bytes, FloatFormat, Floats
from colibri.kernels.api import KV_BLOCK, Attention, Batch, Limits, Matrix, Norm, RopeTable
from colibri.kv import KVPool, StateShape
from colibri.lab.bench_config import KernelBench
from colibri.lab.bench_result import Measured, Result
from colibri.lab.bootstrap import interval, median
from colibri.lab.inputs import gaussian
from colibri.lab.pairs import Ring, alternate
from colibri.lab.working_set import BenchKernels, check_room
from colibri.nn.attention import keys_and_values

# The heads of Qwen3-30B-A3B. The layer is narrow, so that its projections, which are matrices and
# measured as such, take no part worth mentioning.
_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN = 32, 4, 128, 32
_FLUSH = 128 << 20  # bytes that are read between turns, to have the caches forget


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTurns:
    """Contenders over a K/V pool of many layers.

    Attributes:
        data: the whole pool.
        steps: one token through each layer.
    """

    kernels: BenchKernels
    data: Bytes
    steps: list[Callable[[], None]]
    ring: Ring

    def read(self) -> float:
        """Half of the pool, and nothing else; bytes per second."""
        spans = self.ring.take(self.data.size // 2)
        self.flush()
        start = time.perf_counter()
        for begin, end in spans:
            self.kernels.read_sum(self.data[begin:end])
        return (self.data.size // 2) / (time.perf_counter() - start)

    def attend(self) -> float:
        """One token through every layer; layers per second."""
        self.flush()
        start = time.perf_counter()
        for step in self.steps:
            step()
        return len(self.steps) / (time.perf_counter() - start)

    def flush(self) -> None:
        """Read what the turn to come does not begin with."""
        self.kernels.read_sum(self.data[-min(_FLUSH, self.data.size // 2) :])


# Steps of one token at the last position of a pool, one for each of its layers.
Steps = Callable[[BenchKernels, KVPool, int], list[Callable[[], None]]]


def measured(
    bench: KernelBench, kernels: BenchKernels, op: str, shape: StateShape, steps: Steps, gop: float
) -> Measured:
    """Decoding over `bench.num_positions` positions that keep `shape`, in bf16.

    A layer does `gop` thousand million operations for a million positions.
    """
    blocks = -(-bench.num_positions // KV_BLOCK)
    layer_nbytes = blocks * shape.block_nbytes(BF16)
    num_layers = max(2, -(-bench.working_set_bytes // layer_nbytes))
    check_room(num_layers * layer_nbytes, "the K/V pool of the bench")
    pool = KVPool([shape] * num_layers, blocks, BF16)
    try:
        data = pool.layer(0).planes[0].pool
        _fill(data, BF16)
        turns = AttentionTurns(kernels, data, steps(kernels, pool, num_layers), Ring(data.size))
        rates = alternate([turns.read, turns.attend], bench.pairs)
    finally:
        pool.close()
    limits, layers = rates.T
    shares, speed = layers * layer_nbytes / limits, median(layers.tolist())
    positions = blocks * KV_BLOCK
    result = Result(
        op=op,
        shape=None,
        format=BF16.name,
        activations=str(kernels.activations),
        n=1,
        rows=positions,
        columns=sum(plane.heads * plane.width for plane in shape.planes),
        threads=kernels.threads,
        bytes_per_s=speed * layer_nbytes,
        share_of_limit=median(shares.tolist()),
        gops=speed * gop * positions / 1e6,
        interval=interval(shares.tolist()),
    )
    return Measured(result, limits, shares)


def bench_attention(bench: KernelBench, kernels: BenchKernels) -> Iterator[Measured]:
    """Decoding over keys and values of several heads."""
    shape = StateShape.keys_and_values(_KV_HEADS, _HEAD_DIM)
    gop = 2 * 2 * _HEADS * _HEAD_DIM / 1e3
    yield measured(bench, kernels, "attention", shape, _steps, gop)


def last_position(pool: KVPool) -> Batch:
    """One row at the end of a sequence that fills the pool."""
    table = np.arange(pool.num_blocks, dtype=np.int32)[None]
    last = np.array([pool.num_blocks * KV_BLOCK - 1], np.int32)
    return Batch(last, np.zeros(1, np.int32), table)


def unturned(rotary_dim: int) -> RopeTable:
    """A rotation by nothing: the time is the same."""
    ones = np.ones((1, rotary_dim // 2), np.float32)
    return RopeTable(ones, 0 * ones)


def drawn_matrix(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Normal bf16 weights whose rows have length one."""
    values: Floats = gaussian(rng, rows, columns) * np.float32(columns**-0.5)
    return Matrix(BF16, rows, columns, BF16.encode(values))


def _steps(kernels: BenchKernels, pool: KVPool, num_layers: int) -> list[Callable[[], None]]:
    layer, batch, rope = _layer(), last_position(pool), unturned(_HEAD_DIM)
    x = gaussian(np.random.default_rng(0), 1, _HIDDEN)
    y = np.zeros_like(x)
    return [
        partial(kernels.attention_step, layer, x, batch, rope, keys_and_values(pool.layer(i)), y)
        for i in range(num_layers)
    ]


def _layer() -> Attention:
    matrix = partial(drawn_matrix, np.random.default_rng(0))
    return Attention(
        norm=Norm(np.ones(_HIDDEN, np.float32), 1e-6),
        q_proj=matrix(_HEADS * _HEAD_DIM, _HIDDEN),
        k_proj=matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
        v_proj=matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
        o_proj=matrix(_HIDDEN, _HEADS * _HEAD_DIM),
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        scale=_HEAD_DIM**-0.5,
        rotary_dim=_HEAD_DIM,
    )


def _fill(data: Bytes, fmt: FloatFormat) -> None:
    """Normal keys and values; each piece begins elsewhere in the same drawn numbers."""
    drawn = fmt.encode(gaussian(np.random.default_rng(0), 1024, 1024))
    for number, start in enumerate(range(0, data.size, drawn.size)):
        piece = data[start : start + drawn.size]
        piece[...] = np.roll(drawn, 4096 * number)[: piece.size]


LIMITS = Limits(
    rows=1,
    hidden_size=_HIDDEN,
    attention_width=(_HEADS + 2 * _KV_HEADS) * _HEAD_DIM,
    intermediate_size=1,
    num_experts=1,
    num_experts_per_tok=1,
    vocab_size=1,
)
