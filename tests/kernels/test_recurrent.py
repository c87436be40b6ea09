"""Short convolutions and the delta rule: against the reference and a plain loop, chunked, mixed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import Bytes, Floats
from colibri.kernels.api import Batch, CellLayer, Kernels
from colibri.kernels.recurrent_api import DeltaRule, ShortConv
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    native,
    variants,
)

SEEDS = st.integers(0, 2**32 - 1)
Step = Callable[[Kernels, slice, Batch, CellLayer], Floats]


def cells(num: int, state_nbytes: int) -> CellLayer:
    """Cells of zeros with something of another layer on both sides."""
    cell = 64 + state_nbytes + 4
    pool = np.full(num * cell, 0x55, np.uint8)
    for c in range(num):
        pool[c * cell + 64 : c * cell + 64 + state_nbytes] = 0
    return CellLayer(pool, cell, 64, state_nbytes)


def whose(members: list[int], of: list[int]) -> Batch:
    tables = np.zeros((len(of), 0), np.int32)
    rows = np.array(members, np.int32)
    return Batch(np.zeros_like(rows), rows, tables, np.array(of, np.int32))


def run(
    kernels: Kernels, step: Step, state_nbytes: int, rows: int, chunk: int
) -> tuple[Floats, Bytes]:
    """One sequence in chunks, in cell 1 of 3; outputs and all cells."""
    layer = cells(3, state_nbytes)
    out = [
        step(kernels, slice(t, t + chunk), whose([0] * min(chunk, rows - t), [1]), layer)
        for t in range(0, rows, chunk)
    ]
    return np.concatenate(out), layer.pool


def check(step: Step, state_nbytes: int, rows: int, error: float) -> Floats:
    """Native against the reference; the same bits for every chunk, thread and instruction set."""
    wanted, _ = run(REFERENCE, step, state_nbytes, rows, rows)
    found, pool = run(native(), step, state_nbytes, rows, rows)
    assert_close(found, wanted, error)
    assert_close(run(REFERENCE, step, state_nbytes, rows, 1)[0], wanted, error)
    for chunk in (1, 2, rows):
        for kernels in variants("int16"):
            again, same = run(kernels, step, state_nbytes, rows, chunk)
            assert_same_bits(again, found)
            np.testing.assert_array_equal(same, pool)
    untouched = pool.reshape(3, -1)
    assert (untouched[:, :64] == 0x55).all()
    assert (untouched[:, -4:] == 0x55).all()
    assert not untouched[[0, 2], 64:-4].any()
    return found


def conv_step(layer: ShortConv, x: Floats) -> Step:
    def step(kernels: Kernels, at: slice, rows: Batch, state: CellLayer) -> Floats:
        part = x[at].copy()
        kernels.short_conv(layer, part[:, 1:-1], rows, state)
        return part

    return step


@settings(max_examples=examples(40))
@given(
    channels=st.integers(1, 150),
    kernel=st.integers(1, 5),
    rows=st.integers(1, 9),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dilation=st.integers(1, 3),
    seed=SEEDS,
)
def test_short_conv(
    channels: int,
    kernel: int,
    rows: int,
    switches: tuple[bool, bool, bool],
    dilation: int,
    seed: int,
) -> None:
    rng = generator(seed)
    has_bias, silu, residual = switches
    bias = gaussian(rng, channels) if has_bias else None
    layer = ShortConv(gaussian(rng, channels, kernel), bias, silu, residual, dilation)
    x = gaussian(rng, rows, channels + 2)
    found = check(conv_step(layer, x), layer.state_nbytes, rows, 4e-6)
    assert_same_bits(found[:, [0, -1]], x[:, [0, -1]])


def test_short_conv_is_a_causal_convolution() -> None:
    rng = generator(1)
    layer = ShortConv(gaussian(rng, 6, 4))
    x = gaussian(rng, 10, 8)
    found, _ = run(native(), conv_step(layer, x), layer.state_nbytes, 10, 3)
    for c in range(6):
        wanted = np.convolve(x[:, c + 1], layer.weight[c, ::-1])[:10]
        np.testing.assert_allclose(found[:, c + 1], wanted, rtol=1e-4, atol=1e-5)


def test_taps_lie_a_dilation_apart() -> None:
    rng = generator(1)
    layer = ShortConv(gaussian(rng, 6, 4), dilation=3)
    x = gaussian(rng, 14, 8)
    found, _ = run(native(), conv_step(layer, x), layer.state_nbytes, 14, 5)
    spread = np.zeros((6, 10), np.float32)
    spread[:, ::3] = layer.weight
    for c in range(6):
        wanted = np.convolve(x[:, c + 1], spread[c, ::-1])[:14]
        np.testing.assert_allclose(found[:, c + 1], wanted, rtol=1e-4, atol=1e-5)


def operands(rng: np.random.Generator, layer: DeltaRule, rows: int) -> tuple[Floats, ...]:
    """q, k, v side by side in one array; decay and beta between 0 and 1."""
    keys, values = layer.num_key_heads * layer.key_dim, layer.num_heads * layer.value_dim
    qkv = gaussian(rng, rows, 2 * keys + values)
    decay = rng.random((rows, layer.num_heads * layer.decay_width), np.float32)
    beta = rng.random((rows, layer.num_heads), np.float32)
    return qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :], decay, beta


def delta_step(layer: DeltaRule, given: tuple[Floats, ...]) -> Step:
    def step(kernels: Kernels, at: slice, rows: Batch, state: CellLayer) -> Floats:
        q, k, v, decay, beta = (part[at] for part in given)
        return kernels.delta_rule(layer, q, k, v, decay, beta, rows, state)

    return step


def rule(key_heads: int, ratio: int, key_dim: int, value_dim: int, decay: Any) -> DeltaRule:
    return DeltaRule(key_heads, key_heads * ratio, key_dim, value_dim, key_dim**-0.5, decay)


@settings(max_examples=examples(30))
@given(
    key_heads=st.integers(1, 3),
    ratio=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    value_dim=st.sampled_from([1, 7, 16, 24, 64, 80, 128, 150]),
    decay=st.sampled_from(["head", "channel"]),
    rows=st.integers(1, 7),
    seed=SEEDS,
)
def test_delta_rule(
    key_heads: int, ratio: int, key_dim: int, value_dim: int, decay: str, rows: int, seed: int
) -> None:
    layer = rule(key_heads, ratio, key_dim, value_dim, decay)
    step = delta_step(layer, operands(generator(seed), layer, rows))
    check(step, layer.state_nbytes, rows, 2e-5)


def test_delta_rule_is_its_recurrence() -> None:
    """A head at a time in float64, as the papers write it."""
    layer = rule(1, 2, 12, 20, "channel")
    rows = 30
    q, k, v, decay, beta = operands(generator(2), layer, rows)
    found, _ = run(native(), delta_step(layer, (q, k, v, decay, beta)), layer.state_nbytes, rows, 4)
    for head in range(2):
        state = np.zeros((12, 20))
        for t in range(rows):
            unit_k = k[t] / np.sqrt(np.sum(k[t].astype(np.float64) ** 2) + 1e-6)
            unit_q = q[t] / np.sqrt(np.sum(q[t].astype(np.float64) ** 2) + 1e-6) * 12**-0.5
            state *= decay[t, head * 12 : head * 12 + 12, None]
            value = v[t, head * 20 : head * 20 + 20]
            state += np.outer(unit_k, beta[t, head] * (value - unit_k @ state))
            out = found[t, head * 20 : head * 20 + 20]
            np.testing.assert_allclose(out, unit_q @ state, atol=2e-5)


@pytest.mark.parametrize("kernels", [REFERENCE, native(), native(threads=3)])
def test_sequences_do_not_meet(kernels: Kernels) -> None:
    """Rows of three sequences, mixed in one batch, are those of each alone."""
    layer, rng = rule(2, 2, 16, 24, "head"), generator(3)
    conv = ShortConv(gaussian(rng, 5, 4), silu=True)
    order = [0, 2, 2, 1, 0, 2, 0, 1, 1, 2]
    given, x = operands(rng, layer, len(order)), gaussian(rng, len(order), 7)
    places = [3, 0, 2]
    mixed_cells = cells(4, layer.state_nbytes), cells(4, conv.state_nbytes)
    rows = whose(order, places)
    mixed = delta_step(layer, given)(kernels, slice(None), rows, mixed_cells[0])
    mixed_conv = conv_step(conv, x)(kernels, slice(None), rows, mixed_cells[1])
    for member in range(3):
        here = np.flatnonzero(np.array(order) == member)
        alone = whose([0] * len(here), [places[member]])
        own = delta_step(layer, tuple(np.ascontiguousarray(part[here]) for part in given))
        wanted = own(kernels, slice(None), alone, cells(4, layer.state_nbytes))
        wanted_conv = conv_step(conv, x[here])(
            kernels, slice(None), alone, cells(4, conv.state_nbytes)
        )
        if kernels is REFERENCE:
            assert_close(mixed[here], wanted, 1e-6)
            assert_close(mixed_conv[here], wanted_conv, 1e-6)
        else:
            assert_same_bits(mixed[here], wanted)
            assert_same_bits(mixed_conv[here], wanted_conv)


def test_cells_that_are_not_there_are_refused() -> None:
    layer, rng = rule(1, 2, 4, 16, "head"), generator(4)
    step, good = delta_step(layer, operands(rng, layer, 2)), cells(2, layer.state_nbytes)
    short = CellLayer(good.pool, layer.state_nbytes, 64, layer.state_nbytes)
    odd = CellLayer(good.pool, good.cell_nbytes, 62, layer.state_nbytes)
    conv = ShortConv(gaussian(rng, 5, 4))
    conv_cells = cells(1, conv.state_nbytes)
    for rows, state in (
        (whose([0, 1], [0]), good),
        (whose([0, -1], [0]), good),
        (whose([0, 0], [2]), good),
        (whose([0, 0], [-1]), good),
        (whose([0, 0], [0]), short),
        (whose([0, 0], [0]), odd),
    ):
        with pytest.raises(ValueError, match="out of range"):
            step(native(), slice(None), rows, state)
    with pytest.raises(ValueError, match="out of range"):
        conv_step(conv, gaussian(rng, 2, 7))(native(), slice(None), whose([0, 0], [9]), conv_cells)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rng, rows = generator(4), whose([0, 0], [0])
    wide, uneven = ShortConv(gaussian(rng, 5, 17)), DeltaRule(2, 3, 4, 16, 1.0)
    state = cells(1, max(wide.state_nbytes, uneven.state_nbytes))
    with pytest.raises(ValueError, match="17"):
        conv_step(wide, gaussian(rng, 2, 7))(native(), slice(None), rows, state)
    step = delta_step(uneven, operands(rng, uneven, 2))
    with pytest.raises(ValueError, match="multiple of 2 key heads"):
        step(native(), slice(None), rows, state)
    layer = rule(1, 2, 4, 16, "head")
    q, k, v, decay, beta = operands(rng, layer, 2)
    with pytest.raises(ValueError, match="k must be"):
        native().delta_rule(layer, q, v, k, decay, beta, rows, state)
