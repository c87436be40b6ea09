"""Latent attention to pools of positions: against the reference, the same bits in any chunks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F32, Floats
from colibri.kernels.api import KV_BLOCK, Batch, CellLayer, Ints, Kernels, KVPlane
from colibri.kernels.latent import LatentAttention, LatentCache
from colibri.kernels.shared_key import Pooling
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    rope,
    variants,
)
from tests.kernels.latents import latent, latent_cache, tables

WIDTH, INDEX_DIM = 24, 16


def pooled(seed: int, heads: int, pool: int, top_k: int, rope_dim: int) -> LatentAttention:
    """A layer whose index keys are pooled."""
    rng = generator(seed)
    layer = latent(rng, heads=heads, rope_dim=rope_dim, top_k=top_k, index_heads=17)
    assert layer.indexer is not None
    indexer = replace(
        layer.indexer,
        gate_proj=matrix(rng, F32, INDEX_DIM, WIDTH),
        pooling=Pooling(gaussian(rng, pool, INDEX_DIM), INDEX_DIM, pool),
    )
    return replace(layer, indexer=indexer, pool=pool)


def cache_of(layer: LatentAttention) -> LatentCache:
    """Planes full of NaN, and sums of zeros."""
    plain = latent_cache(layer, F32, 4)
    if layer.indexer is None:
        return plain
    block = F32.nbytes((max(1, KV_BLOCK // layer.pool), INDEX_DIM)) + 64
    keys = np.full(4 * block, 0xFF, np.uint8)
    plane = KVPlane(keys, F32, block, 32, 1, INDEX_DIM, layer.pool)
    assert layer.indexer.pooling is not None
    nbytes = layer.indexer.pooling.state_nbytes
    sums = CellLayer(np.zeros(2 * (nbytes + 64), np.uint8), nbytes + 64, 64, nbytes)
    return replace(plain, index_key=plane, sums=sums)


def run(
    kernels: Kernels, layer: LatentAttention, x: Floats, chunk: int, given: Ints | None = None
) -> tuple[Floats, Ints]:
    """All rows of one sequence in chunks; and what was selected."""
    cache, out = cache_of(layer), x.copy()
    selected = np.full((len(x), layer.top_k or 0), -1, np.int32) if given is None else given
    for begin in range(0, len(x), chunk):
        end = min(begin + chunk, len(x))
        positions = np.arange(begin, end, dtype=np.int32)
        cells = np.array([1], np.int32)
        here = Batch(positions, np.zeros_like(positions), tables(cache), cells)
        angles = rope(positions, layer.rotary_dim)
        kernels.latent_step(layer, out[begin:end], here, angles, cache, selected[begin:end])
    return out, selected


@settings(max_examples=examples(10))
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.sampled_from([2, 4, 64, 128]),
    st.integers(1, 6),
    st.sampled_from([0, 8]),
)
def test_any_pools(seed: int, heads: int, pool: int, top_k: int, rope_dim: int) -> None:
    layer, x = pooled(seed, heads, pool, top_k, rope_dim), gaussian(generator(seed), 135, WIDTH)
    wanted, chosen = run(REFERENCE, layer, x, 135)
    found, selected = run(native(), layer, x, 135)
    assert_close(found, wanted, 2e-5)
    np.testing.assert_array_equal(selected, chosen)
    for chunk in (1, 50):
        for kernels in variants("int16"):
            again, same = run(kernels, layer, x, chunk)
            assert_same_bits(again, found)
            np.testing.assert_array_equal(same, selected)
    follower = replace(layer, indexer=None)
    for kernels in (REFERENCE, native()):
        assert_close(run(kernels, follower, x, 50, selected)[0], wanted, 2e-5)


def test_what_does_not_fit_is_refused() -> None:
    layer, x = pooled(1, 3, 4, 2, 8), gaussian(generator(1), 20, WIDTH)
    follower, wrong = replace(layer, indexer=None), np.full((20, 2), 5, np.int32)
    with pytest.raises(ValueError, match="positions that its row does not have"):
        run(native(), follower, x, 20, wrong)
    with pytest.raises(ValueError, match="index keys pooled by 4"):
        run(native(), replace(layer, pool=2), x, 20)
