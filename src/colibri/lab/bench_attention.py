"""One token's attention over a long context, for many layers whose keys no cache holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from colibri.formats import BF16, FloatFormat, Floats
from colibri.kernels.api import KV_BLOCK, Attention, Batch, KVLayer, Limits, Matrix, Norm, RopeTable
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
    """Contenders over a K/V pool of many layers."""

    kernels: BenchKernels
    layer: Attention
    layers: list[KVLayer]
    batch: Batch
    rope: RopeTable
    ring: Ring

    @classmethod
    def over(cls, kernels: BenchKernels, pool: KVPool, num_layers: int) -> AttentionTurns:
        """One sequence that fills the pool."""
        positions = pool.num_blocks * KV_BLOCK
        table = np.arange(pool.num_blocks, dtype=np.int32)[None]
        batch = Batch(np.array([positions - 1], np.int32), np.zeros(1, np.int32), table)
        ones = np.ones((1, _HEAD_DIM // 2), np.float32)
        layers = [keys_and_values(pool.layer(index)) for index in range(num_layers)]
        return cls(
            kernels, _layer(), layers, batch, RopeTable(ones, 0 * ones), Ring(layers[0].pool.size)
        )

    def read(self) -> float:
        """Half of the pool, and nothing else; bytes per second."""
        data = self.layers[0].pool
        spans = self.ring.take(data.size // 2)
        self.flush()
        start = time.perf_counter()
        for begin, end in spans:
            self.kernels.read_sum(data[begin:end])
        return (data.size // 2) / (time.perf_counter() - start)

    def attend(self) -> float:
        """One token through every layer; layers per second."""
        x = gaussian(np.random.default_rng(0), 1, _HIDDEN)
        self.flush()
        start = time.perf_counter()
        for kv in self.layers:
            self.kernels.attention_step(self.layer, x, self.batch, self.rope, kv)
        return len(self.layers) / (time.perf_counter() - start)

    def flush(self) -> None:
        """Read what the turn to come does not begin with."""
        data = self.layers[0].pool
        self.kernels.read_sum(data[-min(_FLUSH, data.size // 2) :])


def bench_attention(bench: KernelBench, kernels: BenchKernels) -> Iterator[Measured]:
    """Decoding over `bench.num_positions` positions of bf16 keys and values."""
    blocks = -(-bench.num_positions // KV_BLOCK)
    layer_nbytes = blocks * 2 * BF16.nbytes((_KV_HEADS * KV_BLOCK, _HEAD_DIM))
    num_layers = max(2, -(-bench.working_set_bytes // layer_nbytes))
    check_room(num_layers * layer_nbytes, "the K/V pool of the bench")
    pool = KVPool([StateShape.keys_and_values(_KV_HEADS, _HEAD_DIM)] * num_layers, blocks, BF16)
    try:
        _fill(pool, BF16)
        turns = AttentionTurns.over(kernels, pool, num_layers)
        rates = alternate([turns.read, turns.attend], bench.pairs)
    finally:
        pool.close()
    limits, layers = rates.T
    shares, speed = layers * layer_nbytes / limits, median(layers.tolist())
    positions = blocks * KV_BLOCK
    result = Result(
        op="attention",
        shape=None,
        format=BF16.name,
        activations=str(kernels.activations),
        n=1,
        rows=positions,
        columns=2 * _KV_HEADS * _HEAD_DIM,
        threads=kernels.threads,
        bytes_per_s=speed * layer_nbytes,
        share_of_limit=median(shares.tolist()),
        gops=speed * 2 * 2 * _HEADS * _HEAD_DIM * positions / 1e9,
        interval=interval(shares.tolist()),
    )
    yield Measured(result, limits, shares)


def _layer() -> Attention:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Matrix:
        values: Floats = gaussian(rng, rows, columns) * np.float32(columns**-0.5)
        return Matrix(BF16, rows, columns, BF16.encode(values))

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


def _fill(pool: KVPool, fmt: FloatFormat) -> None:
    """Normal keys and values; each piece begins elsewhere in the same drawn numbers."""
    data = pool.layer(0).planes[0].pool
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
