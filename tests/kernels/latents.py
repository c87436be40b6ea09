"""Small latent attention layers and their caches for the kernel tests."""

from typing import Any

import numpy as np

from colibri.formats import F32, FloatFormat, Floats, Format, RowInt8Format
from colibri.kernels.api import KV_BLOCK, Ints, Kernels, KVPlane
from colibri.kernels.latent import Indexer, LatentAttention, LatentCache
from tests.kernels.builders import batch, gaussian, generator, matrix, norm, rope


def latent(
    rng: np.random.Generator,
    fmt: Format = F32,
    absorbed: Format = F32,
    *,
    hidden: int = 24,
    heads: int = 3,
    q_rank: int | None = 20,
    rank: int = 24,
    nope: int = 16,
    rope_dim: int = 8,
    value: int = 12,
    top_k: int | None = None,
    index_heads: int | None = None,
    index_dim: int = 16,
    **options: Any,
) -> LatentAttention:
    low = hidden if q_rank is None else q_rank
    rotary_dim = options.setdefault("rotary_dim", rope_dim)
    indexer = None
    if index_heads is not None:
        indexer = Indexer(
            q_proj=matrix(rng, fmt, index_heads * index_dim, low),
            k_proj=matrix(rng, fmt, index_dim, hidden),
            k_norm=norm(rng, index_dim),
            k_norm_bias=gaussian(rng, index_dim) / np.float32(8),
            weights_proj=matrix(rng, fmt, index_heads, hidden),
            num_heads=index_heads,
            head_dim=index_dim,
            rotary_dim=rotary_dim,
            scale=index_dim**-0.5,
            weight_scale=index_heads**-0.5,
        )
    return LatentAttention(
        norm=norm(rng, hidden),
        q_a_proj=None if q_rank is None else matrix(rng, fmt, low, hidden),
        q_norm=None if q_rank is None else norm(rng, low),
        q_b_proj=matrix(rng, fmt, heads * (nope + rope_dim), low),
        kv_a_proj=matrix(rng, fmt, rank + rope_dim, hidden),
        kv_norm=norm(rng, rank),
        kv_b_proj=matrix(rng, absorbed, heads * (nope + value), rank),
        o_proj=matrix(rng, fmt, hidden, heads * value),
        num_heads=heads,
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=value,
        scale=(nope + rope_dim) ** -0.5,
        top_k=top_k,
        indexer=indexer,
        **options,
    )


def latent_cache(
    layer: LatentAttention, fmt: FloatFormat | RowInt8Format, num_blocks: int
) -> LatentCache:
    """A pool full of NaN: whoever reads a position that was never written shows it."""
    widths = [layer.kv_norm.weight.size, layer.rope_dim]
    if layer.indexer is not None:
        widths.append(layer.indexer.head_dim)
    sizes = [fmt.nbytes((KV_BLOCK, width)) for width in widths]
    block = sum(sizes) + 64
    pool = np.full(num_blocks * block, 0xFF, np.uint8)
    starts = np.cumsum([64, *sizes]).tolist()
    planes = [
        KVPlane(pool, fmt, block, start, 1, width)
        for start, width in zip(starts, widths, strict=False)
    ]
    return LatentCache(*planes)


def tables(cache: LatentCache) -> Ints:
    """The blocks of one sequence, out of order, then places that are still empty."""
    num = cache.latent.pool.size // cache.latent.block_nbytes
    blocks = generator(9).permutation(num).astype(np.int32)[None]
    return np.concatenate([blocks, np.full((1, 2), -1, np.int32)], axis=1)


def run(
    kernels: Kernels,
    layer: LatentAttention,
    cache: LatentCache,
    x: Floats,
    cuts: list[int],
    given: Ints | None = None,
) -> tuple[Floats, Ints | None]:
    """All rows of `x`, one sequence, in chunks that end at `cuts`; and the keys selected."""
    out, table = x.copy(), tables(cache)
    selected = given
    if selected is None and layer.top_k is not None:
        selected = np.full((len(x), layer.top_k), -1, np.int32)
    for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
        part = batch(list(range(begin, end)), [0] * (end - begin), table)
        chosen = None if selected is None else selected[begin:end]
        angles = rope(part.positions, layer.rotary_dim)
        kernels.latent_step(layer, out[begin:end], part, angles, cache, chosen)
    return out, selected
