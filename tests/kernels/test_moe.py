"""Routing and experts: numbers against the reference, bits in whatever order experts land."""

import signal
import threading
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F32, FORMATS, Floats
from colibri.kernels.api import (
    EMPTY,
    FAILED,
    LOADING,
    READY,
    Attention,
    Experts,
    Head,
    Kernels,
    Limits,
    NonFiniteRow,
    Router,
    Routing,
    SlotFailed,
    Slots,
)
from colibri.kernels.native import NativeKernels
from tests.kernels.builders import (
    ERROR,
    FORMAT_NAMES,
    REFERENCE,
    TOKENS,
    assert_close,
    assert_same_bits,
    attention,
    batch,
    experts,
    gaussian,
    generator,
    glu,
    kv_layer,
    matrix,
    native,
    norm,
    rope,
    router,
    routing,
    slots_of,
    variants,
)


def run(
    kernels: Kernels, layer: Experts, found: Routing, table: Slots, x: Floats, cuts: list[int]
) -> Floats:
    """The layer, its experts in several calls that end at `cuts`."""
    out, y = x.copy(), np.zeros_like(x)
    ends = [*cuts, len(found.experts)]
    for begin, end in zip([0, *cuts], ends, strict=True):
        ids = found.experts[begin:end]
        kernels.moe_step(layer, found, ids, slots_of(layer, ids), table, y)
    kernels.moe_finish(layer, found, y, out)
    return out


@settings(max_examples=150, deadline=None)
@given(
    fmt=st.sampled_from(FORMAT_NAMES).map(FORMATS.__getitem__),
    activations=st.sampled_from(list(ERROR)),
    hidden=st.sampled_from([8, 33, 70]),
    units=st.sampled_from([8, 13, 130]),
    num=st.integers(1, 20),
    tokens=st.sampled_from(TOKENS),
    shared=st.booleans(),
    data=st.data(),
)
def test_moe_step(
    fmt: Any,
    activations: str,
    hidden: int,
    units: int,
    num: int,
    tokens: int,
    shared: bool,
    data: Any,
) -> None:
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    layer, table = experts(rng, fmt, hidden, units, num, shared)
    found = routing(rng, tokens, hidden, num, data.draw(st.integers(1, num)))
    x = gaussian(rng, tokens, hidden)
    out = run(native(activations), layer, found, table, x, [])
    error = ERROR[activations] if fmt.is_coded else ERROR["float32"]
    assert_close(out, run(REFERENCE, layer, found, table, x, []), 2 * error)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(found.experts)), max_size=3)))
    for kernels in variants(activations):
        assert_same_bits(run(kernels, layer, found, table, x, cuts), out)
    row = data.draw(st.integers(0, tokens - 1))
    ids = found.ids[row : row + 1]
    alone = Routing(found.hidden[row : row + 1], ids, found.weights[row : row + 1], np.unique(ids))
    assert_same_bits(
        run(native(activations), layer, alone, table, x[row : row + 1], []), out[row : row + 1]
    )


def test_many_rows_take_experts_ascending_to_the_same_bits() -> None:
    """40 tokens of 8 experts are more rows than are kept apart; calls of two experts are not."""
    rng = generator(0)
    layer, table = experts(rng, FORMATS["int4-g32"], 64, 32, 16)
    found = routing(rng, 40, 64, 16, 8)
    x = gaussian(rng, 40, 64)
    together = run(native(), layer, found, table, x, [])
    assert_close(together, run(REFERENCE, layer, found, table, x, []), ERROR["int16"])
    for kernels in variants("int16"):
        assert_same_bits(run(kernels, layer, found, table, x, []), together)
        assert_same_bits(run(kernels, layer, found, table, x, list(range(2, 16, 2))), together)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("first_delay_s", [0.0, 0.12])
def test_experts_that_land_meanwhile(tokens: int, first_delay_s: float) -> None:
    """Slots become ready in random order; the longer delay makes the call come back and go on."""
    rng = generator(1)
    layer, table = experts(rng, FORMATS["int8-g64"], 64, 64, 8)
    found = routing(rng, tokens, 64, 8, 8)
    x = gaussian(rng, tokens, 64)
    wanted = run(native(), layer, found, table, x, [])
    table.states[:] = LOADING
    table.states[2] = READY
    order = rng.permutation(8)

    def land() -> None:
        for slot in order:
            table.states[slot] = READY

    timer = threading.Timer(first_delay_s, land)
    timer.start()
    assert_same_bits(run(native("int16", 2), layer, found, table, x, []), wanted)
    timer.join()


@pytest.mark.parametrize("state", [FAILED, EMPTY])
@pytest.mark.parametrize("tokens", [3, 60])
def test_a_slot_that_fails_is_named(tokens: int, state: int) -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 8)
    found = routing(rng, tokens, 16, 8, 8)
    table.states[5] = state
    with pytest.raises(SlotFailed) as caught:
        run(native(), layer, found, table, gaussian(rng, tokens, 16), [])
    assert caught.value.slot == 5


class SignalError(Exception):
    """Raised by the test's own signal handler."""


def test_waiting_can_be_interrupted() -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 2)
    found = routing(rng, 1, 16, 2, 2)
    table.states[0] = LOADING

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(SignalError):
            run(native(), layer, found, table, gaussian(rng, 1, 16), [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("ids", "slots"), [([2], [0]), ([1, 0], [0, 1]), ([0, 0], [0, 1]), ([0], [2]), ([0], [-1])]
)
def test_wrong_experts_and_slots_are_refused(ids: list[int], slots: list[int]) -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 2)
    found = routing(rng, 1, 16, 2, 2)
    c_ids, c_slots = np.array(ids, np.int32), np.array(slots, np.int32)
    with pytest.raises(ValueError, match="out of range"):
        native().moe_step(layer, found, c_ids, c_slots, table, np.zeros((1, 16), np.float32))


def test_a_part_outside_the_arena_is_refused() -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 2)
    found = routing(rng, 1, 16, 2, 2)
    table.parts[1, 2] += 3
    with pytest.raises(ValueError, match="out of range"):
        run(native(), layer, found, table, gaussian(rng, 1, 16), [])


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["f32", "bf16", "int8-g32"]),
    num=st.integers(1, 32),
    tokens=st.sampled_from(TOKENS),
    normalize=st.booleans(),
    data=st.data(),
)
def test_route_step(name: str, num: int, tokens: int, normalize: bool, data: Any) -> None:
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    active = data.draw(st.integers(1, num))
    layer = router(rng, FORMATS[name], 40, num, active, normalize)
    x = gaussian(rng, tokens, 40)
    wanted, found = REFERENCE.route_step(layer, x), native("float32").route_step(layer, x)
    assert_close(found.hidden, wanted.hidden, 1e-6)
    assert_close(found.weights, wanted.weights, 1e-4)
    np.testing.assert_array_equal(found.experts, np.unique(found.ids))
    for kernels in variants("float32"):
        again = kernels.route_step(layer, x)
        np.testing.assert_array_equal(again.ids, found.ids)
        assert_same_bits(again.weights, found.weights)
        assert_same_bits(again.hidden, found.hidden)


def test_the_choice_of_the_reference() -> None:
    rng = generator(5)
    layer = router(rng, F32, 64, 32, 8, True)
    x = gaussian(rng, 33, 64)
    wanted, found = REFERENCE.route_step(layer, x), native().route_step(layer, x)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.experts, wanted.experts)


@pytest.mark.parametrize("active", [1, 6, 1024])
def test_a_thousand_experts(active: int) -> None:
    rng = generator(5)
    layer = router(rng, F32, 16, 1024, active, False)
    kernels = NativeKernels(threads=1)
    kernels.reserve(Limits(2, 16, 16, 16, 1024, active, 16))
    x = gaussian(rng, 2, 16)
    found = kernels.route_step(layer, x)
    wanted = REFERENCE.route_step(layer, x)
    assert_close(found.weights, wanted.weights, 1e-5)
    np.testing.assert_array_equal(found.experts, np.unique(found.ids))
    np.testing.assert_array_equal(found.ids[:, :6], wanted.ids[:, :6])


@pytest.mark.parametrize("active", [1, 3, 8])
def test_ties_go_to_the_lowest_id(active: int) -> None:
    rng = generator(6)
    gate = matrix(rng, F32, 8, 16, shift=0)
    rows = gate.data.view(np.float32).reshape(8, 16)
    rows[:] = rows[0]
    found = native().route_step(Router(norm(rng, 16), gate, active, True), gaussian(rng, 2, 16))
    np.testing.assert_array_equal(found.ids, [list(range(active))] * 2)
    np.testing.assert_allclose(found.weights, 1 / active, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(value: float) -> None:
    rng = generator(7)
    x = gaussian(rng, 5, 16)
    x[3, 2] = value
    for name in ("f32", "int8-g32"):
        with pytest.raises(NonFiniteRow) as caught:
            native().route_step(router(rng, FORMATS[name], 16, 8, 2, True), x)
        assert caught.value.row == 3


@settings(max_examples=40, deadline=None)
@given(
    fmt=st.sampled_from(FORMAT_NAMES).map(FORMATS.__getitem__),
    rows=st.sampled_from([1, 5, 33]),
    hidden=st.integers(1, 80),
    units=st.integers(1, 80),
    head_dim=st.integers(1, 5).map(lambda n: 4 * n),
    num=st.integers(1, 12),
)
def test_the_workspace_of_the_limits_is_enough(
    fmt: Any, rows: int, hidden: int, units: int, head_dim: int, num: int
) -> None:
    rng = generator(8)
    layer = attention(rng, fmt, hidden, kv_heads=1, ratio=3, head_dim=head_dim)
    kernels = NativeKernels(threads=1)
    kernels.reserve(Limits(rows, hidden, 5 * head_dim, units, num, num, 9))
    x = gaussian(rng, rows, hidden)
    run_attention(kernels, layer, x)
    kernels.ffn_step(glu(rng, fmt, hidden, units, normed=True), x)
    moe, table = experts(rng, fmt, hidden, units, num, shared=True)
    found = kernels.route_step(router(rng, fmt, hidden, num, num, True), x)
    out = run(kernels, moe, found, table, x, [])
    logits = kernels.head_step(Head(norm(rng, hidden), matrix(rng, fmt, 9, hidden)), out)
    assert np.isfinite(logits).all()


def run_attention(kernels: Kernels, layer: Attention, x: Floats) -> None:
    part = batch(list(range(len(x))), [0] * len(x), np.zeros((1, 1), np.int32))
    kernels.attention_step(
        layer, x, part, rope(part.positions, layer.rotary_dim), kv_layer(layer, F32, 1)
    )
