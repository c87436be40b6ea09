"""One token's latent attention over a long context: all heads share what a position keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from colibri.kernels.api import Limits, Norm
from colibri.kernels.latent import LatentAttention, LatentCache, LatentLimits
from colibri.kv import KVPool, StateShape
from colibri.kv.shape import Plane
from colibri.lab.bench_attention import drawn_matrix, last_position, measured, unturned
from colibri.lab.bench_config import KernelBench
from colibri.lab.bench_result import Measured
from colibri.lab.inputs import gaussian
from colibri.lab.working_set import BenchKernels

# Heads, latent and rope key of DeepSeek-V3. Layer and heads are narrow, so that projections, which
# are matrices and measured as such, take no part worth mentioning.
_HEADS, _RANK, _ROPE_DIM = 128, 512, 64
_NOPE_DIM, _VALUE_DIM, _HIDDEN, _LOW = 8, 8, 32, 32


def bench_latent(bench: KernelBench, kernels: BenchKernels) -> Iterator[Measured]:
    """Decoding over latents and rope keys."""
    shape = StateShape((Plane(1, _RANK), Plane(1, _ROPE_DIM)))
    gop = 2 * _HEADS * (_RANK + _ROPE_DIM + _RANK) / 1e3  # a score, then a value
    yield measured(bench, kernels, "latent", shape, _steps, gop)


def _steps(kernels: BenchKernels, pool: KVPool, num_layers: int) -> list[Callable[[], None]]:
    layer, batch, rope = _layer(), last_position(pool), unturned(_ROPE_DIM)
    x = gaussian(np.random.default_rng(0), 1, _HIDDEN)
    y = np.zeros_like(x)
    step = partial(kernels.latent_step, layer, x, batch, rope)
    return [partial(step, _cache(pool, index), None, y) for index in range(num_layers)]


def _cache(pool: KVPool, layer: int) -> LatentCache:
    latent, rope_key = pool.layer(layer).planes
    return LatentCache(latent, rope_key)


def _layer() -> LatentAttention:
    matrix = partial(drawn_matrix, np.random.default_rng(0))
    return LatentAttention(
        norm=_norm(_HIDDEN),
        q_a_proj=matrix(_LOW, _HIDDEN),
        q_norm=_norm(_LOW),
        q_b_proj=matrix(_HEADS * (_NOPE_DIM + _ROPE_DIM), _LOW),
        kv_a_proj=matrix(_RANK + _ROPE_DIM, _HIDDEN),
        kv_norm=_norm(_RANK),
        kv_b_proj=matrix(_HEADS * (_NOPE_DIM + _VALUE_DIM), _RANK),
        o_proj=matrix(_HIDDEN, _HEADS * _VALUE_DIM),
        num_heads=_HEADS,
        nope_dim=_NOPE_DIM,
        rope_dim=_ROPE_DIM,
        value_dim=_VALUE_DIM,
        rotary_dim=_ROPE_DIM,
        scale=(_RANK + _ROPE_DIM) ** -0.5,
    )


def _norm(width: int) -> Norm:
    return Norm(np.ones(width, np.float32), 1e-6)


LIMITS = Limits(
    rows=1,
    hidden_size=_HIDDEN,
    attention_width=1,
    intermediate_size=1,
    num_experts=1,
    num_experts_per_tok=1,
    vocab_size=1,
    latent=LatentLimits(
        heads=_HEADS,
        q_rank=_LOW,
        head_dim=_NOPE_DIM + _ROPE_DIM,
        rank=_RANK,
        key=_RANK + _ROPE_DIM,
    ),
)
