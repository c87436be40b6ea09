"""Latent attention: numbers against the reference, and the same bits however the rows arrive."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F16, F32, FORMATS, INT8_ROWS, Floats
from colibri.kernels.api import Ints
from colibri.kernels.latent import LatentAttention, LatentCache
from colibri.kernels.reference_heads import rotate
from colibri.kernels.reference_latent import read_plane
from colibri.kernels.reference_math import rms_norm, softmax
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    batch,
    gaussian,
    generator,
    matrix,
    native,
    rope,
    variants,
)
from tests.kernels.latents import latent, latent_cache, run, tables

KV_ERROR = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2, "int8": 6e-2}

LAYERS = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([24, 33]),
        "heads": st.sampled_from([1, 3, 16, 17, 33, 40]),
        "q_rank": st.sampled_from([None, 20]),
        "rank": st.sampled_from([16, 24, 80]),
        "nope": st.sampled_from([3, 16]),
        "rope_dim": st.sampled_from([2, 8]),
        "value": st.sampled_from([5, 16]),
        "rope_pairing": st.sampled_from(["half", "pair"]),
    }
)


@settings(max_examples=examples(60))
@given(
    options=LAYERS,
    rotated=st.booleans(),
    fmt=st.sampled_from([F32, F16, BF16, INT8_ROWS]),
    absorbed=st.sampled_from([F32, F16, BF16]),
    tokens=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_latent_step(
    options: dict[str, Any],
    rotated: bool,
    fmt: Any,
    absorbed: Any,
    tokens: int,
    cuts: list[int],
    seed: int,
) -> None:
    rng = generator(seed)
    rotary_dim = options["rope_dim"] if rotated else 0
    layer = latent(rng, F32, absorbed, rotary_dim=rotary_dim, **options)
    x, blocks = gaussian(rng, tokens, options["hidden"]), -(-tokens // 64)
    found, _ = run(native("float32"), layer, latent_cache(layer, fmt, blocks), x, [])
    wanted, _ = run(REFERENCE, layer, latent_cache(layer, fmt, blocks), x, [])
    assert_close(found, wanted, KV_ERROR[fmt.name])
    chunks = sorted({cut for cut in cuts if cut < tokens} - {0})
    for kernels in variants("float32"):
        again, _ = run(kernels, layer, latent_cache(layer, fmt, blocks), x, chunks)
        assert_same_bits(again, found)


def expanded(layer: LatentAttention, x: Floats) -> Floats:
    """The same attention as its definition states it: every head has keys and values."""
    positions = np.arange(len(x), dtype=np.int32)
    angles, rank = rope(positions, layer.rotary_dim), layer.kv_norm.weight.size
    hidden = rms_norm(x, layer.norm)
    assert layer.q_a_proj is not None
    assert layer.q_norm is not None
    low = rms_norm(REFERENCE.matmul(layer.q_a_proj, hidden), layer.q_norm)
    q = REFERENCE.matmul(layer.q_b_proj, low).reshape(len(x), layer.num_heads, -1)
    c, key = np.split(REFERENCE.matmul(layer.kv_a_proj, hidden), [rank], axis=1)
    kv = REFERENCE.matmul(layer.kv_b_proj, rms_norm(c, layer.kv_norm))
    kv = kv.reshape(len(x), layer.num_heads, -1)
    dn = layer.nope_dim
    turned = rotate(key[:, None], angles, layer.rope_pairing).repeat(layer.num_heads, axis=1)
    k = np.concatenate([kv[..., :dn], turned], axis=2)
    q = np.concatenate([q[..., :dn], rotate(q[..., dn:], angles, layer.rope_pairing)], axis=2)
    scores = np.einsum("thd,shd->hts", q, k) * layer.scale
    scores = np.where(positions[:, None] >= positions, scores, -np.inf)
    weights = softmax(scores.astype(np.float32))
    mixed = np.einsum("hts,shd->thd", weights, kv[..., dn:]).reshape(len(x), -1)
    out: Floats = x + REFERENCE.matmul(layer.o_proj, mixed)
    return out


def test_absorbed_is_what_the_definition_says() -> None:
    rng = generator(4)
    layer, x = latent(rng), gaussian(rng, 40, 24)
    found, _ = run(REFERENCE, layer, latent_cache(layer, F32, 1), x, [])
    assert_close(found, expanded(layer, x), 1e-5)


@pytest.mark.parametrize("name", ["int4-g64", "int8-g32", "bf16"])
def test_coded_projections(name: str) -> None:
    rng = generator(1)
    layer = latent(rng, FORMATS[name], BF16, hidden=72, heads=6, q_rank=40)
    x = gaussian(rng, 70, 72)
    found, _ = run(native("int16"), layer, latent_cache(layer, F32, 2), x, [])
    wanted, _ = run(REFERENCE, layer, latent_cache(layer, F32, 2), x, [])
    assert_close(found, wanted, 1e-3)
    for kernels in variants("int16"):
        again, _ = run(kernels, layer, latent_cache(layer, F32, 2), x, [1, 2, 30])
        assert_same_bits(again, found)


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("fmt", [BF16, INT8_ROWS], ids=repr)
def test_decoding_far_behind_many_splits(fmt: Any, heads: int) -> None:
    """One row sees several splits, which threads take apart; so do rows of a long chunk."""
    rng = generator(11)
    layer = latent(rng, hidden=8, heads=heads, rank=16, nope=4, rope_dim=2, value=4)
    x = gaussian(rng, 4100, 8)
    cache = latent_cache(layer, fmt, 65)
    whole, _ = run(native("float32"), layer, cache, x, [1000, 2000, 3000])
    table = tables(cache)
    for last in (1023, 1024, 2500, 4099):
        for kernels in variants("float32"):
            row, part = x[last : last + 1].copy(), batch([last], [0], table)
            kernels.latent_step(layer, row, part, rope(part.positions, 2), cache)
            assert_same_bits(row, whole[last : last + 1])


INDEXERS = st.fixed_dictionaries(
    {
        "index_heads": st.sampled_from([1, 4, 17, 33]),
        "index_dim": st.sampled_from([8, 20, 48]),
        "top_k": st.sampled_from([1, 5, 64, 100]),
        "heads": st.sampled_from([1, 3, 20]),
        "q_rank": st.sampled_from([None, 20]),
    }
)


@settings(max_examples=examples(40))
@given(
    options=INDEXERS,
    fmt=st.sampled_from([F32, BF16]),
    tokens=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_selected_keys(
    options: dict[str, Any], fmt: Any, tokens: int, cuts: list[int], seed: int
) -> None:
    """The indexer chooses as the reference does, where scores differ; a layer after it follows."""
    rng = generator(seed)
    layer = latent(rng, **options)
    x, blocks = gaussian(rng, tokens, 24), -(-tokens // 64)
    found, chosen = run(native("float32"), layer, latent_cache(layer, fmt, blocks), x, [])
    given_, follower = chosen, dataclasses.replace(layer, indexer=None)
    wanted, _ = run(REFERENCE, follower, latent_cache(follower, fmt, blocks), x, [], given_)
    assert_close(found, wanted, KV_ERROR[fmt.name])
    again, _ = run(native("float32"), follower, latent_cache(layer, fmt, blocks), x, [], given_)
    assert_same_bits(again, found)
    assert chosen is not None
    for row in range(tokens):
        if row < layer.top_k:
            assert (chosen[row] == -1).all()
        else:
            assert (np.diff(chosen[row]) > 0).all()
            assert 0 <= chosen[row, 0] <= chosen[row, -1] <= row
    chunks = sorted({cut for cut in cuts if cut < tokens} - {0})
    for kernels in variants("float32"):
        out, same = run(kernels, layer, latent_cache(layer, fmt, blocks), x, chunks)
        np.testing.assert_array_equal(same, chosen)
        assert_same_bits(out, found)


def test_the_choice_of_the_reference() -> None:
    rng = generator(5)
    layer, x = latent(rng, index_heads=12, top_k=8), gaussian(rng, 90, 24)
    _, wanted = run(REFERENCE, layer, latent_cache(layer, F32, 2), x, [])
    _, found = run(native(), layer, latent_cache(layer, F32, 2), x, [])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("top_k", [1, 3, 1500])
def test_the_exact_best_of_many_with_ties_to_the_lower(top_k: int) -> None:
    """Keys that repeat tie, over several splits; the choice is that of a stable sort."""
    rng = generator(6)
    layer = latent(rng, hidden=8, index_heads=2, index_dim=8, top_k=top_k, rotary_dim=0)
    x = np.tile(gaussian(rng, 50, 8), (60, 1))
    cache = latent_cache(layer, F32, 47)
    table = tables(cache)
    chosen = np.zeros((len(x), top_k), np.int32)
    part = batch(list(range(len(x))), [0] * len(x), table)
    for begin in range(0, len(x), 1000):
        rows = slice(begin, begin + 1000)
        piece = batch(part.positions[rows].tolist(), [0] * 1000, table)
        angles = rope(piece.positions, 0)
        native("float32", 2).latent_step(layer, x[rows].copy(), piece, angles, cache, chosen[rows])
    scores = first_scores(layer, cache, table[0], x[:50])
    for row in (top_k, top_k + 700, 2999):
        of_all = np.tile(scores[row % 50], 60)[: row + 1]
        best = np.sort(np.argsort(-of_all, kind="stable")[:top_k])
        np.testing.assert_array_equal(chosen[row], best)


def first_scores(layer: LatentAttention, cache: LatentCache, table: Ints, x: Floats) -> Floats:
    """The indexer's scores `[T, T]` of the first rows, with the keys that the cache holds."""
    indexer = layer.indexer
    assert indexer is not None
    assert cache.index_key is not None
    assert layer.q_a_proj is not None
    assert layer.q_norm is not None
    hidden = rms_norm(x, layer.norm)
    low = rms_norm(REFERENCE.matmul(layer.q_a_proj, hidden), layer.q_norm)
    q = REFERENCE.matmul(indexer.q_proj, low).reshape(len(x), indexer.num_heads, -1)
    weights = REFERENCE.matmul(indexer.weights_proj, hidden)
    keys = read_plane(cache.index_key, table, len(x))
    found: Floats = np.einsum("th,ths->ts", weights, np.maximum(q @ keys.T, 0))
    return found


def test_a_layer_that_contradicts_itself_is_refused() -> None:
    rng = generator(7)
    layer = latent(rng)
    broken = {
        "o_proj": matrix(rng, F32, 24, 35),
        "kv_b_proj": matrix(rng, FORMATS["int8-g32"], 84, 24),
        "rotary_dim": 6,
        "q_norm": layer.kv_norm,
    }
    for name, value in broken.items():
        bad = dataclasses.replace(layer, **{name: value})
        with pytest.raises(ValueError, match=r"shapes|absorbed|rotary_dim|norm"):
            run(native(), bad, latent_cache(layer, F32, 1), gaussian(rng, 1, 24), [])


def test_a_cache_of_another_layer_is_refused() -> None:
    rng = generator(7)
    layer = latent(rng)
    cache = latent_cache(latent(rng, rank=16), F32, 1)
    with pytest.raises(ValueError, match="latent: the pool keeps"):
        run(native(), layer, cache, gaussian(rng, 1, 24), [])


def test_a_selection_must_be_there_and_stay_below_its_row() -> None:
    rng = generator(8)
    layer = latent(rng, top_k=2)
    cache, x = latent_cache(layer, F32, 1), gaussian(rng, 1, 24)
    part = batch([5], [0], np.zeros((1, 1), np.int32))
    angles = rope(part.positions, 8)
    with pytest.raises(ValueError, match="need a selection"):
        native().latent_step(layer, x, part, angles, cache)
    with pytest.raises(ValueError, match="does not have"):
        native().latent_step(layer, x, part, angles, cache, np.array([[0, 6]], np.int32))


@pytest.mark.parametrize(
    ("position", "member", "table"),
    [
        (0, 1, [[0, 0]]),
        (128, 0, [[0, 0]]),
        (-1, 0, [[0, 0]]),
        (64, 0, [[0, -1]]),
        (64, 0, [[0, 1]]),
    ],
)
def test_a_block_outside_the_pool_is_refused(
    position: int, member: int, table: list[list[int]]
) -> None:
    layer = latent(generator(2))
    cache = latent_cache(layer, F32, 1)
    part = batch([0, position], [0, member], np.array(table, np.int32))
    x = np.zeros((2, 24), np.float32)
    with pytest.raises(ValueError, match=r"out of range \(at 1\)"):
        native().latent_step(layer, x, part, rope(part.positions, 8), cache)
