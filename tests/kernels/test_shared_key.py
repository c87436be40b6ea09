"""Shared keys, entries and their selection: against the reference, the same bits in any chunks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import (
    BF16,
    F32,
    FORMATS,
    INT8_ROWS,
    FloatFormat,
    Floats,
    RowInt8Format,
    padded,
)
from colibri.kernels.api import (
    KV_BLOCK,
    Batch,
    CellLayer,
    Ints,
    Kernels,
    KVPlane,
    RopeTable,
)
from colibri.kernels.shared_key import (
    WINDOW_SLACK,
    CellWindow,
    EntryIndexer,
    Pooling,
    SharedKeyAttention,
    SharedKeyCache,
)
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    norm,
    rope,
    variants,
)

SEEDS = st.integers(0, 2**32 - 1)
STRIDES = st.sampled_from([1, 2, 4, 8, 64, 128])


def plane(fmt: FloatFormat | RowInt8Format, width: int, stride: int, num: int = 6) -> KVPlane:
    """A plane full of NaN: whoever reads an entry that was never written shows it."""
    block = fmt.nbytes((max(1, KV_BLOCK // stride), width)) + 64
    return KVPlane(np.full(num * block, 0xFF, np.uint8), fmt, block, 32, 1, width, stride)


def batch_of(begin: int, end: int) -> Batch:
    """Positions of one sequence, whose blocks lie out of order, and its cell."""
    positions = np.arange(begin, end, dtype=np.int32)
    table = np.array([[3, 0, 5, 1, 4, 2, -1]], np.int32)
    return Batch(positions, np.zeros_like(positions), table, np.array([1], np.int32))


def cells(nbytes: int) -> CellLayer:
    return CellLayer(np.zeros(3 * (nbytes + 64), np.uint8), nbytes + 64, 64, nbytes)


def window(fmt: FloatFormat | RowInt8Format, width: int, seen: int) -> CellWindow:
    """Cells full of NaN, with something of another layer before."""
    positions = seen + WINDOW_SLACK
    nbytes = padded(fmt.nbytes((positions, width)), 4)
    cell = nbytes + 64
    layer = CellLayer(np.full(3 * cell, 0xFF, np.uint8), cell, 64, nbytes)
    return CellWindow(layer, fmt, width, positions)


def pool(
    kernels: Kernels, layer: Pooling, values: Floats, gates: Floats, chunk: int, fmt: Any = F32
) -> tuple[Floats, Floats]:
    """The plane and the states after all rows, which come in chunks."""
    kept, state = plane(fmt, layer.width, layer.stride), cells(layer.state_nbytes)
    for begin in range(0, len(values), chunk):
        end = min(begin + chunk, len(values))
        rows = batch_of(begin, end)
        first = rope(np.maximum(rows.positions - layer.stride + 1, 0), layer.rotary_dim)
        part = values[begin:end].copy(), gates[begin:end]
        kernels.pool_rows(layer, *part, rows, first, state, kept)
    return kept.pool, state.pool


def pooling(rng: np.random.Generator, width: int, stride: int, **options: Any) -> Pooling:
    columns = width * (2 if options.get("overlap") else 1)
    return Pooling(gaussian(rng, stride, columns), width, stride, **options)


@settings(max_examples=examples(10))
@given(SEEDS, st.integers(4, 70), STRIDES, st.booleans(), st.booleans())
def test_any_pooling(seed: int, width: int, stride: int, overlap: bool, normed: bool) -> None:
    rng, rows = generator(seed), 135
    layer = pooling(rng, width, stride, overlap=overlap)
    if normed:
        layer = replace(layer, norm=norm(rng, width), rotary_dim=width // 4 * 2)
    values, gates = gaussian(rng, rows, layer.columns), gaussian(rng, rows, layer.columns)
    wanted = [part.view(np.float32) for part in pool(REFERENCE, layer, values, gates, rows)]
    found = pool(native(), layer, values, gates, rows)
    for one, other in zip(found, wanted, strict=True):
        assert_close(np.nan_to_num(one.view(np.float32)), np.nan_to_num(other), 2e-5)
    for chunk in (1, 7):
        for kernels in variants("int16"):
            for again, first in zip(pool(kernels, layer, values, gates, chunk), found, strict=True):
                np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("kernels", [REFERENCE, native()], ids=lambda k: k.name)
def test_an_entry_is_a_softmax_over_its_positions(kernels: Kernels) -> None:
    rng, width, stride = generator(5), 6, 4
    layer = pooling(rng, width, stride, overlap=True)
    values, gates = gaussian(rng, 12, 12), 8 * gaussian(rng, 12, 12)
    found = pool(kernels, layer, values, gates, 5)[0]
    kept = plane(F32, width, stride)
    block = kept.block_nbytes
    entries = found[3 * block + 32 :][: 12 * width].view(np.float32).reshape(3, width)
    scores = (gates.reshape(3, 4, 12) + layer.bias.reshape(4, 12)).astype(np.float64)
    shares, parts = np.exp(scores), values.reshape(3, 4, 12)
    for number in range(3):
        before = slice(number - 1, number) if number else slice(0, 0)
        share = np.concatenate([*shares[before, :, :6], shares[number, :, 6:]])
        part = np.concatenate([*parts[before, :, :6], parts[number, :, 6:]])
        wanted = (share * part).sum(axis=0) / share.sum(axis=0)
        np.testing.assert_allclose(entries[number], wanted, atol=1e-5)


def attend(
    kernels: Kernels,
    layer: SharedKeyAttention,
    index: EntryIndexer | None,
    operands: dict[str, Floats],
    chunk: int,
    fmt: Any,
) -> tuple[Floats, Ints]:
    """All rows in chunks; what was found and what was selected."""
    rows, width = len(operands["q"]), layer.head_dim
    entry = plane(fmt, width, layer.stride) if layer.stride else None
    cache = SharedKeyCache(window(fmt, width, layer.window), entry)
    state, out = cells(4 * 3 * width), np.empty_like(operands["q"])
    index_state, keys = cells(4 * 3 * 8), plane(fmt, 8, layer.stride or 1)
    chosen = np.full((rows, layer.top_k or 1), -1, np.int32)
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        here, at = batch_of(begin, end), slice(begin, end)
        first = rope(np.maximum(here.positions - layer.stride + 1, 0), layer.rotary_dim)
        angles = rope(here.positions, layer.rotary_dim)

        def given(name: str, part: slice = at) -> Floats:
            return operands[name][part].copy()

        if entry is not None:
            made = Pooling(operands["bias"], width, layer.stride, rotary_dim=layer.rotary_dim)
            kernels.pool_rows(made, given("v"), given("g"), here, first, state, entry)
        if index is not None:
            made = Pooling(operands["index_bias"], 8, layer.stride, rotary_dim=layer.rotary_dim)
            both = given("index_v"), given("index_g")
            kernels.pool_rows(made, *both, here, first, index_state, keys)
            found = given("index_q"), given("weights")
            kernels.select_entries(index, *found, here, angles, keys, chosen[at])
        selected = None if index is None else chosen[at]
        out[at] = kernels.shared_key_attention(
            layer, given("q"), given("k"), here, angles, cache, selected
        )
    return out, chosen


def case(
    seed: int, heads: int, width: int, window: int, stride: int, top_k: int | None, rows: int
) -> tuple[SharedKeyAttention, EntryIndexer | None, dict[str, Floats]]:
    rng, rotary = generator(seed), 4
    layer = SharedKeyAttention(
        heads, width, rotary, width**-0.5, window, gaussian(rng, heads), stride, top_k
    )
    index = None if top_k is None else EntryIndexer(17, 8, rotary, 0.1, stride, top_k)
    shapes = {"q": heads * width, "k": width, "v": width, "g": width}
    shapes |= {"index_q": 17 * 8, "index_v": 8, "index_g": 8, "weights": 17}
    operands = {name: gaussian(rng, rows, columns) for name, columns in shapes.items()}
    operands["bias"] = gaussian(rng, max(stride, 1), width)
    operands["index_bias"] = gaussian(rng, max(stride, 1), 8)
    return layer, index, operands


@settings(max_examples=examples(10))
@given(
    SEEDS,
    st.integers(1, 40),
    st.integers(4, 40),
    st.integers(1, 90),
    st.sampled_from([0, 1, 4, 64, 128]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([F32, BF16, INT8_ROWS]),
)
def test_any_attention(
    seed: int, heads: int, width: int, window: int, stride: int, top_k: int | None, fmt: Any
) -> None:
    top_k = top_k if stride else None
    layer, index, operands = case(seed, heads, width, window, stride, top_k, 135)
    wanted, chosen = attend(REFERENCE, layer, index, operands, 135, fmt)
    found, selected = attend(native(), layer, index, operands, 135, fmt)
    if fmt is F32:  # coarser keys differ where a number is just between two codes
        assert_close(found, wanted, 2e-5)
        np.testing.assert_array_equal(selected, chosen)
    assert np.isfinite(found).all()
    for chunk in (1, 50):
        for kernels in variants("int16"):
            again, same = attend(kernels, layer, index, operands, chunk, fmt)
            assert_same_bits(again, found)
            np.testing.assert_array_equal(same, selected)


def test_a_window_holds_for_more_rows_than_it_keeps() -> None:
    """Keys of a long step are written over those that its first rows have seen."""
    rows = 6 * KV_BLOCK - 4
    layer, index, operands = case(3, 2, 8, 20, 64, None, rows)
    assert rows > layer.window + WINDOW_SLACK
    wanted, _ = attend(REFERENCE, layer, index, operands, rows, F32)
    found, _ = attend(native(), layer, index, operands, rows, F32)
    assert_close(found, wanted, 2e-5)
    for kernels in variants("int16"):
        assert_same_bits(attend(kernels, layer, index, operands, 7, F32)[0], found)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (2, 5), (4, 33)])
def test_groups_of_rows(name: str, groups: int, rows: int) -> None:
    rng = generator(7)
    weights = matrix(rng, FORMATS[name], groups * 24, 64)
    x = gaussian(rng, rows, groups * 64)
    wanted = REFERENCE.matmul_groups(weights, groups, x)
    exact = native("float32").matmul_groups(weights, groups, x)
    assert_close(exact, wanted, 2e-5)
    found = native().matmul_groups(weights, groups, x)
    assert_close(found, wanted, 2e-3)
    for kernels in variants("int16"):
        assert_same_bits(kernels.matmul_groups(weights, groups, x), found)
        assert_same_bits(kernels.matmul_groups(weights, groups, x[:1].copy()), found[:1])


def test_what_does_not_fit_is_refused() -> None:
    layer, index, operands = case(1, 3, 8, 9, 4, 2, 30)
    assert index is not None
    kernels, here = native(), batch_of(0, 30)
    angles, cache = rope(here.positions, 4), SharedKeyCache(window(F32, 8, 9), plane(F32, 8, 4))
    q, k = operands["q"], operands["k"]
    with pytest.raises(ValueError, match="out of range"):  # no selection
        kernels.shared_key_attention(layer, q, k, here, angles, cache)
    wrong = np.full((30, 2), 9, np.int32)
    with pytest.raises(ValueError, match="out of range"):
        kernels.shared_key_attention(layer, q, k, here, angles, cache, wrong)
    other = SharedKeyCache(cache.key, plane(F32, 8, 8))
    with pytest.raises(ValueError, match="stride 4"):
        kernels.shared_key_attention(layer, q, k, here, angles, other, wrong)
    odd = replace(index, stride=3)
    short = SharedKeyCache(window(F32, 8, 8), cache.entry)
    with pytest.raises(ValueError, match="wanted 265 rows of 8"):
        kernels.shared_key_attention(layer, q, k, here, angles, short, wrong)
    with pytest.raises(ValueError, match="neither divide a block"):
        kernels.select_entries(odd, q, k, here, angles, plane(F32, 8, 3), wrong)
    with pytest.raises(ValueError, match="out of range"):
        kernels.matmul_groups(matrix(generator(1), F32, 20, 8), 2, gaussian(generator(2), 3, 16))


def test_the_table_of_a_step_is_made_once() -> None:
    """Layers whose ropes differ share the rest of a batch."""
    kernels, here = native(), batch_of(0, 3)
    first, second = rope(here.positions, 4), RopeTable(*(np.ones((3, 2), np.float32),) * 2)
    made = [kernels._batch_of(here, table, 2) for table in (first, second, first)]
    assert made[0] is made[2]
    assert made[0] is not made[1]
