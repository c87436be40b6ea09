"""Attention of the reference against loops in float64, with blocks of the pool in any order."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F16, F32, FloatFormat
from colibri.kernels.api import KV_BLOCK, Norm, RopeTable
from colibri.kernels.reference import ReferenceKernels
from colibri.kernels.reference_heads import attend, rotate
from colibri.kernels.reference_math import rms_norm
from tests.unit.kernels.operands import (
    HIDDEN,
    KV_TOLERANCE,
    attention,
    batch,
    kv_layer,
    normal,
    plain_attend,
    plain_attention,
    plain_norm,
    rope_table,
    turned,
)

KERNELS = ReferenceKernels()
seeds = st.integers(0, 2**32 - 1)
VARIANTS: list[dict[str, object]] = [
    {},
    {"heads": 4, "kv_heads": 4},
    {"heads": 6, "kv_heads": 1, "bias": True},
    {"qk_norm": "head", "head_dim": 4},
    {"qk_norm": "projection", "clip": 0.5},
    {"heads": 1, "kv_heads": 1, "qk_norm": "head"},
    {"window": 3, "pairing": "pair"},
    {"window": 70, "rotary_dim": 4},
    {"rotary_dim": 0, "clip": 0.25},
]


@given(seeds, st.integers(1, 5), st.integers(1, 40), st.sampled_from([1e-6, 1e-5, 0.1]))
def test_rms_norm(seed: int, rows: int, size: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, rows, size) * np.float32(10), Norm(normal(rng, size), eps)
    found = rms_norm(x, weight)
    assert found.dtype == np.float32
    assert np.allclose(found, plain_norm(x.astype(np.float64), weight), rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(np.zeros((2, 3), np.float32), Norm(np.ones(3, np.float32), 1e-6)).any()


@pytest.mark.parametrize("pairing", ["half", "pair"])
@given(seeds, st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))
def test_rotation_is_a_complex_product(
    pairing: str, seed: int, heads: int, half: int, rest: int
) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, 5, heads, 2 * half + rest)
    before, angles = x.copy(), rng.uniform(-50, 50, (5, half))
    found = rotate(x, rope_table(angles), pairing)
    assert found.dtype == np.float32
    assert np.allclose(found, turned(x, angles, pairing), rtol=1e-5, atol=1e-6)
    assert np.array_equal(x, before)


def test_pairings_differ() -> None:
    x, table = np.eye(1, 4, dtype=np.float32)[None], rope_table(np.array([[np.pi / 2, 0]]))
    assert np.allclose(rotate(x, table, "half"), [[[0, 0, 1, 0]]], atol=1e-7)
    assert np.allclose(rotate(x, table, "pair"), [[[0, 1, 0, 0]]], atol=1e-7)


@settings(max_examples=30)
@given(
    seeds,
    st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)]),
    st.one_of(st.none(), st.integers(1, 12)),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
)
def test_attend(seed: int, heads: tuple[int, int], window: int | None, rows: list[int]) -> None:
    rng = np.random.default_rng(seed)
    q, positions = normal(rng, len(rows), heads[0], 4), np.array(rows, np.int32)
    k, v = normal(rng, 12, heads[1], 4) * np.float32(3), normal(rng, 12, heads[1], 4)
    found = attend(q, k, v, positions, 0.5, window)
    assert found.dtype == np.float32
    assert np.allclose(found, plain_attend(q, k, v, positions, 0.5, window), atol=1e-5)


def test_a_window_of_one_sees_the_token_itself() -> None:
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 3, 2, 4), normal(rng, 3, 2, 4), normal(rng, 3, 2, 4)
    assert np.allclose(attend(q, k, v, np.arange(3), 1.0, 1), v)


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 4), 1e4, np.float32)
    k, v = np.stack([q[0], -q[0]]), np.ones((2, 1, 4), np.float32)
    assert np.array_equal(attend(q, k, v, np.array([1]), 1.0, None), v[:1])


@pytest.mark.parametrize("fmt", [F32, BF16], ids=repr)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_attention_step(variant: dict[str, object], fmt: FloatFormat) -> None:
    rng = np.random.default_rng(1)
    layer = attention(rng, **variant)  # type: ignore[arg-type]
    length = KV_BLOCK + 9
    x = normal(rng, length, HIDDEN)
    positions = np.arange(length)
    angles = positions[:, None] * 0.7 ** np.arange(1, layer.rotary_dim // 2 + 1)
    wanted = plain_attention(layer, x, positions, angles, fmt)
    rows = batch(positions.tolist(), [0] * length, [[2, 0, -1]])
    KERNELS.attention_step(layer, x, rows, rope_table(angles), kv_layer(3, layer, fmt, 128, 64))
    assert np.allclose(x, wanted, atol=KV_TOLERANCE[fmt])


@pytest.mark.parametrize("tables", list(permutations(range(4), 2)))
def test_sequences_do_not_meet(tables: tuple[int, ...]) -> None:
    """Rows of two sequences, shuffled, fed in chunks, with blocks anywhere in the pool."""
    rng = np.random.default_rng(2)
    layer = attention(rng, window=50)
    lengths = [KV_BLOCK + 3, 20]
    free = [block for block in range(4) if block not in tables]
    table = [[tables[0], free[0]], [tables[1], -1]]
    inputs = [normal(rng, length, HIDDEN) for length in lengths]
    wanted = []
    for x in inputs:
        positions = np.arange(len(x))
        wanted.append(
            plain_attention(layer, x, positions, _angles(positions, layer.rotary_dim), F32)
        )
    kv = kv_layer(4, layer)
    steps = [(0, range(30)), (1, range(7)), (0, range(30, 67)), (1, range(7, 20))]
    for first, second in (steps[:2], steps[2:]):
        rows = [(m, p) for m, span in (first, second) for p in span]
        rng.shuffle(rows)
        x = np.stack([inputs[m][p] for m, p in rows])
        positions = np.array([p for _, p in rows])
        found = batch(positions.tolist(), [m for m, _ in rows], table)
        KERNELS.attention_step(layer, x, found, rope_table(_angles(positions, 8)), kv)
        for row, (m, p) in zip(x, rows, strict=True):
            assert np.allclose(row, wanted[m][p], atol=2e-5)


def _angles(positions: np.ndarray, rotary_dim: int) -> np.ndarray:
    return positions[:, None] * 0.5 ** np.arange(rotary_dim // 2)


@pytest.mark.parametrize("fmt", [F32, F16, BF16], ids=repr)
def test_the_pool_holds_keys_then_values_where_the_layer_says(fmt: FloatFormat) -> None:
    rng = np.random.default_rng(3)
    layer = attention(rng, rotary_dim=0)
    before, after = 192, 64
    kv = kv_layer(3, layer, fmt, before, after)
    x = normal(rng, 2, HIDDEN)
    hidden = rms_norm(x, layer.norm)
    wanted = {
        0: KERNELS.matmul(layer.k_proj, hidden).reshape(2, 2, 8),
        1: KERNELS.matmul(layer.v_proj, hidden).reshape(2, 2, 8),
    }
    rope = RopeTable(np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32))
    # The first row stands at position 5 of block 2, the second at position 63.
    KERNELS.attention_step(layer, x, batch([5, 63], [0, 0], [[2]]), rope, kv)
    blocks = kv.pool.reshape(3, -1)
    assert (blocks[:2] == 0xA5).all()
    assert (blocks[2, :before] == 0xA5).all()
    assert (blocks[2, -after:] == 0xA5).all()
    items = blocks[2, before:-after].view(fmt.dtype).reshape(2, -1)
    keys = items[0].reshape(2, 8, KV_BLOCK).transpose(0, 2, 1)  # they lie transposed
    sides = np.stack([keys, items[1].reshape(2, KV_BLOCK, 8)])
    for side, rows in wanted.items():
        for row, place in enumerate((5, 63)):
            assert np.array_equal(sides[side, :, place], fmt.from_float32(rows[row]))
    untouched = np.delete(sides, (5, 63), axis=2)
    assert (untouched.view(np.uint8) == 0xA5).all()
