"""Attention of projected heads: relative biases, temperatures, selected keys; bits and numbers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F32, INT8_ROWS, Floats
from colibri.kernels.api import Ints, Kernels, KVLayer
from colibri.kernels.heads import Heads, RelativeBias
from colibri.kernels.native_structs import Structs
from colibri.kernels.recurrent_api import Projections
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
from tests.kernels.test_attention import KV_ERROR, tables

Operands = dict[str, Any]


def run(
    kernels: Kernels, layer: Heads, kv: KVLayer, operands: Operands, chunks: list[int]
) -> Floats:
    """One sequence in chunks that end at `chunks`; operands are copied, since they may change."""
    found, rows = [], len(operands["q"])
    table = tables(1, kv)
    for begin, end in zip([0, *chunks], [*chunks, rows], strict=True):
        part = {name: value[begin:end].copy() for name, value in operands.items()}
        q, k, v = (part.pop(name) for name in "qkv")
        at = batch(list(range(begin, end)), [0] * (end - begin), table)
        angles = rope(at.positions, layer.rotary_dim)
        found.append(kernels.attend(layer, q, k, v, at, angles, kv, **part))
    return np.concatenate(found)


def operands_of(rng: np.random.Generator, layer: Heads, rows: int, *, warm: bool) -> Operands:
    """Random rows that `layer` takes."""
    width, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    found = {"q": gaussian(rng, rows, 2 * width if layer.gated else width)}
    found |= {"k": gaussian(rng, rows, kv), "v": gaussian(rng, rows, kv)}
    if layer.relative is not None:
        rank = layer.relative.weight.shape[0]
        found["relative"] = gaussian(rng, rows, layer.num_heads * rank)
    if warm:
        found["temperature"] = np.float32(1) + rng.random(rows, np.float32)
    return found


def selection(rng: np.random.Generator, rows: int, most: int) -> Ints:
    """For each row up to `most` of its own and earlier positions, ascending, then -1."""
    found = np.full((rows, most), -1, np.int32)
    for t in range(rows):
        chosen = np.sort(rng.permutation(t + 1)[:most])
        found[t, : len(chosen)] = chosen
    return found


@settings(max_examples=examples(60))
@given(
    kv_heads=st.integers(1, 2),
    ratio=st.sampled_from([1, 3, 17]),
    head_dim=st.sampled_from([4, 16, 20]),
    window=st.sampled_from([None, 5, 70]),
    relative=st.sampled_from([None, (1, 1), (3, 8), (16, 64), (5, 100)]),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    most=st.sampled_from([None, 1, 7, 40]),
    fmt=st.sampled_from([F32, BF16, INT8_ROWS]),
    tokens=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_attend(
    kv_heads: int,
    ratio: int,
    head_dim: int,
    window: int | None,
    relative: tuple[int, int] | None,
    switches: tuple[bool, bool, bool],
    most: int | None,
    fmt: Any,
    tokens: int,
    cuts: list[int],
    seed: int,
) -> None:
    rng = generator(seed)
    gated, sinks, warm = switches
    layer: Heads = attention(
        rng, kv_heads=kv_heads, ratio=ratio, head_dim=head_dim, gated=gated, sinks=sinks,
        window=window if most is None else None, rotary_dim=4, q_norm="head",
    )  # fmt: skip
    if relative is not None:
        layer = dataclasses.replace(layer, relative=RelativeBias(gaussian(rng, *relative)))
    operands = operands_of(rng, layer, tokens, warm=warm)
    if most is not None:
        operands["selected"] = selection(rng, tokens, most)
    blocks = -(-tokens // 64)
    found = run(native("float32"), layer, kv_layer(layer, fmt, blocks), operands, [])
    wanted = run(REFERENCE, layer, kv_layer(layer, fmt, blocks), operands, [])
    assert_close(found, wanted, 5 * KV_ERROR[fmt.name])
    chunks = sorted({cut for cut in cuts if cut < tokens} - {0})
    for kernels in variants("float32"):
        again = run(kernels, layer, kv_layer(layer, fmt, blocks), operands, chunks)
        assert_same_bits(again, found)


@pytest.mark.parametrize("most", [None, 1, 90])
def test_contexts_longer_than_a_split(most: int | None) -> None:
    """A row may see nothing of a whole split."""
    rng = generator(7)
    layer: Heads = attention(rng, head_dim=8, ratio=3)
    layer = dataclasses.replace(layer, relative=RelativeBias(gaussian(rng, 4, 1100)))
    operands = operands_of(rng, layer, 2100, warm=True)
    if most is not None:
        operands["selected"] = selection(rng, 2100, most)
    found = run(native("float32"), layer, kv_layer(layer, F32, 33), operands, [1000, 2000])
    wanted = run(REFERENCE, layer, kv_layer(layer, F32, 33), operands, [1000, 2000])
    assert_close(found, wanted, 2e-5)
    for kernels in variants("float32"):
        again = run(kernels, layer, kv_layer(layer, F32, 33), operands, [1999, 2000, 2001])
        assert_same_bits(again, found)


@pytest.mark.parametrize("gated", [False, True])
def test_a_step_is_its_parts(gated: bool) -> None:
    """`attention_step` is `project`, `attend`, `matmul`, bit for bit."""
    rng = generator(4)
    layer = attention(rng, hidden=24, kv_heads=2, ratio=3, gated=gated, bias=True)
    x, kv = gaussian(rng, 70, 24), kv_layer(layer, BF16, 2)
    at = batch(list(range(70)), [0] * 70, tables(1, kv))
    angles, kernels, whole = rope(at.positions, layer.rotary_dim), native(), x.copy()
    kernels.attention_step(layer, whole, at, angles, kv)
    projections = Projections((layer.q_proj, layer.k_proj, layer.v_proj), layer.norm)
    q, k, v = kernels.project(projections, x)
    found = kernels.attend(layer, q, k, v, at, angles, kv_layer(layer, BF16, 2))
    assert_same_bits(x + kernels.matmul(layer.o_proj, found), whole)


def test_a_bias_ends_at_its_extent() -> None:
    """A bias of one distance alone moves that key's weight and no other's."""
    layer: Heads = attention(generator(1), kv_heads=1, ratio=1, head_dim=4, rotary_dim=0)
    weight = np.zeros((1, 3), np.float32)
    weight[0, 2] = 100.0
    layer = dataclasses.replace(layer, relative=RelativeBias(weight))
    rows = 5
    values = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    still = np.zeros((rows, 4), np.float32)
    operands = {"q": still, "k": still, "v": values, "relative": np.ones((rows, 1), np.float32)}
    found = run(native("float32"), layer, kv_layer(layer, F32, 1), operands, [])
    np.testing.assert_allclose(found[2:], values[:-2], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(found[1], values[:2].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("given", ["weight", "operand"])
def test_a_bias_takes_a_weight_and_an_operand(given: str) -> None:
    rng = generator(1)
    layer: Heads = attention(rng, head_dim=4)
    with_bias = dataclasses.replace(layer, relative=RelativeBias(gaussian(rng, 2, 8)))
    operands = operands_of(rng, with_bias, 3, warm=False)
    if given == "weight":
        del operands["relative"]
    with pytest.raises(ValueError, match="relative biases take a weight and an operand"):
        run(
            native(),
            with_bias if given == "weight" else layer,
            kv_layer(layer, F32, 1),
            operands,
            [],
        )


def test_a_rank_that_has_no_kernel_is_refused() -> None:
    layer: Heads = attention(generator(1), head_dim=4)
    wide = dataclasses.replace(layer, relative=RelativeBias(np.zeros((65, 8), np.float32)))
    with pytest.raises(ValueError, match="the rank of relative biases is at most 64"):
        Structs(native()._library).heads(wide)
