"""Attention: numbers against the reference, and the same bits however the rows arrive."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F16, F32, FORMATS, INT8_ROWS, Floats
from colibri.kernels.api import Attention, Ints, Kernels, KVLayer, Matrix
from colibri.kernels.reference_math import rms_norm
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    attention,
    batch,
    gaussian,
    generator,
    kv_layer,
    native,
    rope,
    variants,
)

KV_ERROR = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2, "int8": 6e-2}

LAYERS = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([8, 24, 33]),
        "kv_heads": st.integers(1, 3),
        "ratio": st.sampled_from([1, 2, 3, 4, 9]),
        "head_dim": st.sampled_from([4, 16, 20, 64, 80]),
        "bias": st.booleans(),
        "q_norm": st.sampled_from([None, "head", "whole"]),
        "clip": st.sampled_from([None, 0.7]),
        "window": st.sampled_from([None, 1, 5, 70]),
        "rope_pairing": st.sampled_from(["half", "pair"]),
        "rotary_dim": st.sampled_from([0, 2, 4]),
        "sinks": st.booleans(),
        "gated": st.booleans(),
    }
)


def run(kernels: Kernels, layer: Attention, kv: KVLayer, x: Floats, chunks: list[int]) -> Floats:
    """All rows of `x`, which are one sequence, in chunks that end at `chunks`."""
    out = x.copy()
    table = tables(1, kv)
    for begin, end in zip([0, *chunks], [*chunks, len(x)], strict=True):
        positions = list(range(begin, end))
        part = batch(positions, [0] * len(positions), table)
        rows = out[begin:end]
        kernels.attention_step(layer, rows, part, rope(part.positions, layer.rotary_dim), kv)
    return out


def tables(members: int, kv: KVLayer) -> Ints:
    """Blocks of each sequence, out of order, then places that are still empty."""
    num = kv.pool.size // kv.block_nbytes
    blocks = generator(9).permutation(num).astype(np.int32).reshape(members, -1)
    return np.concatenate([blocks, np.full((members, 2), -1, np.int32)], axis=1)


@settings(max_examples=examples(100), deadline=None)
@given(
    options=LAYERS,
    fmt=st.sampled_from([F32, F16, BF16, INT8_ROWS]),
    tokens=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_step(
    options: dict[str, Any], fmt: Any, tokens: int, cuts: list[int], seed: int
) -> None:
    rng = generator(seed)
    layer = attention(rng, F32, **options)
    x = gaussian(rng, tokens, options["hidden"])
    blocks = -(-tokens // 64)
    found = run(native("float32"), layer, kv_layer(layer, fmt, blocks), x, [])
    wanted = run(REFERENCE, layer, kv_layer(layer, fmt, blocks), x, [])
    assert_close(found, wanted, KV_ERROR[fmt.name])
    chunks = sorted({cut for cut in cuts if cut < tokens} - {0})
    for kernels in variants("float32"):
        assert_same_bits(run(kernels, layer, kv_layer(layer, fmt, blocks), x, chunks), found)


@pytest.mark.parametrize("fmt", [F32, F16, BF16, INT8_ROWS], ids=repr)
@pytest.mark.parametrize(("head_dim", "ratio"), [(96, 8), (128, 17), (192, 4), (256, 2)])
def test_wide_heads(head_dim: int, ratio: int, fmt: Any) -> None:
    rng = generator(5)
    layer = attention(rng, F32, hidden=8, head_dim=head_dim, ratio=ratio, window=60, sinks=True)
    x = gaussian(rng, 70, 8)
    found = run(native("float32"), layer, kv_layer(layer, fmt, 2), x, [])
    wanted = run(REFERENCE, layer, kv_layer(layer, fmt, 2), x, [])
    assert_close(found, wanted, KV_ERROR[fmt.name])
    for kernels in variants("float32"):
        assert_same_bits(run(kernels, layer, kv_layer(layer, fmt, 2), x, [65, 69]), found)


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("ratio", [1, 3])
def test_contexts_longer_than_a_split(ratio: int, window: int | None) -> None:
    rng = generator(0)
    layer = attention(rng, F32, hidden=8, head_dim=8, ratio=ratio, window=window, sinks=True)
    x = gaussian(rng, 1100, 8)
    found = run(native("float32"), layer, kv_layer(layer, F32, 18), x, [])
    assert_close(found, run(REFERENCE, layer, kv_layer(layer, F32, 18), x, []), 1e-5)
    chunks = [1000, 1023, 1024, 1025, 1099]
    for kernels in variants("float32"):
        assert_same_bits(run(kernels, layer, kv_layer(layer, F32, 18), x, chunks), found)


@pytest.mark.parametrize("name", ["int4-g64", "int8-g32", "bf16"])
def test_coded_projections(name: str) -> None:
    rng = generator(1)
    layer = attention(rng, FORMATS[name], hidden=72, head_dim=32, kv_heads=2, bias=True)
    x = gaussian(rng, 40, 72)
    found = run(native("int16"), layer, kv_layer(layer, F32, 1), x, [])
    assert_close(found, run(REFERENCE, layer, kv_layer(layer, F32, 1), x, []), 5e-4)
    for kernels in variants("int16"):
        assert_same_bits(run(kernels, layer, kv_layer(layer, F32, 1), x, [1, 2, 30]), found)


def test_gates_that_are_open_and_shut() -> None:
    """A gate of +100 changes nothing, one of -100 leaves nothing of its head."""
    rng = generator(3)
    plain = attention(rng, F32, hidden=24, kv_heads=1, ratio=2, head_dim=16, bias=True)
    queries, bias = F32.decode(plain.q_proj.data, (32, 24)), plain.q_proj.bias
    assert bias is not None
    rows = np.zeros((2, 2, 16, 24), np.float32)
    rows[:, 0] = queries.reshape(2, 16, 24)
    gates = np.array([100, -100], np.float32)
    biases = np.stack([bias.reshape(2, 16), np.repeat(gates, 16).reshape(2, 16)], axis=1)
    q_proj = Matrix(F32, 64, 24, F32.encode(rows.reshape(64, 24)), biases.reshape(-1).copy())
    out = F32.decode(plain.o_proj.data, (24, 32)).copy()
    gated = dataclasses.replace(plain, q_proj=q_proj, gated=True)
    out[:, 16:] = 0
    half = dataclasses.replace(plain, o_proj=Matrix(F32, 24, 32, F32.encode(out)))
    x = gaussian(rng, 20, 24)
    found = run(native(), gated, kv_layer(gated, F32, 1), x, [])
    assert_close(found, run(native(), half, kv_layer(half, F32, 1), x, []), 1e-6)


def test_rows_of_several_sequences_do_not_meet() -> None:
    """Two sequences in one call, rows interleaved, against each alone."""
    rng = generator(2)
    layer = attention(rng, F32, hidden=24, kv_heads=2)
    first, second = gaussian(rng, 70, 24), gaussian(rng, 30, 24)
    alone = [run(native(), layer, kv_layer(layer, BF16, 2), x, []) for x in (first, second)]
    kv = kv_layer(layer, BF16, 4)
    x = np.concatenate([first[:30], second, first[30:]])
    order = np.argsort(
        np.concatenate([np.arange(30), np.arange(30), np.arange(30, 70)]), kind="stable"
    )
    members = np.array([0] * 30 + [1] * 30 + [0] * 40)[order]
    positions = np.concatenate([np.arange(30), np.arange(30), np.arange(30, 70)])[order]
    mixed = x[order]
    part = batch(positions.tolist(), members.tolist(), tables(2, kv))
    native().attention_step(layer, mixed, part, rope(part.positions, layer.rotary_dim), kv)
    for member in (0, 1):
        assert_same_bits(mixed[members == member], alone[member])


@pytest.mark.parametrize(
    ("position", "member", "table"),
    [
        (0, 1, [[0, 0]]),
        (0, -1, [[0, 0]]),
        (128, 0, [[0, 0]]),
        (-1, 0, [[0, 0]]),
        (64, 0, [[0, -1]]),
        (64, 0, [[0, 1]]),
    ],
)
def test_a_block_outside_the_pool_is_refused(
    position: int, member: int, table: list[list[int]]
) -> None:
    layer = attention(generator(2))
    kv = kv_layer(layer, F32, 1)
    part = batch([0, position], [0, member], np.array(table, np.int32))
    x = np.zeros((2, 24), np.float32)
    with pytest.raises(ValueError, match=r"out of range \(at 1\)"):
        native().attention_step(layer, x, part, rope(part.positions, layer.rotary_dim), kv)


def test_a_window_does_not_need_the_blocks_behind_it() -> None:
    layer = attention(generator(2), window=8)
    kv = kv_layer(layer, F32, 2)
    x = gaussian(generator(3), 10, 24)
    positions = list(range(192, 202))
    behind = batch(positions, [0] * 10, np.array([[1, 1, 1, 0]], np.int32))
    alone = batch(positions[7:], [0] * 3, np.array([[-1, -1, -1, 0]], np.int32))
    whole, rows = x.copy(), x[7:].copy()
    native().attention_step(layer, whole, behind, rope(behind.positions, layer.rotary_dim), kv)
    native().attention_step(layer, rows, alone, rope(alone.positions, layer.rotary_dim), kv)
    assert_same_bits(rows, whole[7:])


@pytest.mark.parametrize("fmt", [BF16, INT8_ROWS], ids=repr)
@pytest.mark.parametrize("window", [None, 2500])
def test_decoding_far_behind_many_splits(fmt: Any, window: int | None) -> None:
    """One row sees several splits, which threads take apart; so do rows of a long chunk."""
    rng = generator(11)
    layer = attention(rng, F32, hidden=8, head_dim=16, ratio=2, window=window)
    length = 5000
    blocks = -(-length // 64)
    kv = kv_layer(layer, fmt, blocks)
    x = gaussian(rng, length, 8)
    table = tables(1, kv)
    whole = x.copy()
    for begin in range(0, length, 1000):
        positions = list(range(begin, begin + 1000))
        part = batch(positions, [0] * 1000, table)
        rows = whole[begin : begin + 1000]
        native("float32").attention_step(layer, rows, part, rope(part.positions, 16), kv)
    for last in (1023, 1024, 2500, 4999):
        for kernels in variants("float32"):
            row = x[last : last + 1].copy()
            part = batch([last], [0], table)
            kernels.attention_step(layer, row, part, rope(part.positions, 16), kv)
            assert_same_bits(row, whole[last : last + 1])


def test_a_sink_takes_its_share() -> None:
    """A sink as large as all scores together halves what attention adds."""
    rng = generator(12)
    layer = attention(rng, F32, hidden=24)
    x = gaussian(rng, 1, 24)
    alone = run(native(), layer, kv_layer(layer, F32, 1), x, []) - x
    q = REFERENCE.matmul(layer.q_proj, rms(layer, x)).reshape(layer.num_heads, -1)
    k = REFERENCE.matmul(layer.k_proj, rms(layer, x)).reshape(layer.num_kv_heads, -1)
    sinks = (np.repeat(k, 2, axis=0) * q).sum(axis=1) * np.float32(layer.scale)
    with_sink = dataclasses.replace(layer, sinks=sinks.astype(np.float32))
    halved = run(native(), with_sink, kv_layer(layer, F32, 1), x, []) - x
    assert_close(halved, alone / np.float32(2), 1e-5)


def rms(layer: Attention, x: Floats) -> Floats:
    return rms_norm(x, layer.norm)
