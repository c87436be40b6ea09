"""Experts: numbers against the reference, bits in whatever order experts land."""

import dataclasses
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
    Routing,
    SlotFailed,
    Slots,
    Swiglu,
)
from colibri.kernels.native import NativeKernels
from tests.examples import examples
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
    with_biases,
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


@settings(max_examples=examples(150), deadline=None)
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


ACTS = {"clamped": Swiglu(limit=0.5), "shifted": Swiglu(limit=7.0, alpha=1.702, offset=1.0)}


@pytest.mark.parametrize("act", list(ACTS))
@pytest.mark.parametrize("name", ["mxfp4", "int4-g32", "bf16", "fp8-e4m3-b128"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_other_activations_and_biases(name: str, act: str, tokens: int) -> None:
    rng = generator(tokens)
    plain, table = experts(rng, FORMATS[name], 70, 45, 9, shared=True)
    assert plain.shared is not None
    shared = dataclasses.replace(plain.shared, swiglu=ACTS[act])
    layer = dataclasses.replace(plain, swiglu=ACTS[act], shared=shared)
    biased = with_biases(rng, layer, table)
    found = routing(rng, tokens, 70, 9, 8)
    x = gaussian(rng, tokens, 70)
    out = run(native(), layer, found, biased, x, [])
    error = 2 * ERROR["int16" if FORMATS[name].is_coded else "float32"]
    assert_close(out, run(REFERENCE, layer, found, biased, x, []), error)
    for kernels in variants("int16"):
        assert_same_bits(run(kernels, layer, found, biased, x, [1, 3]), out)
    assert (out != run(native(), layer, found, table, x, [])).any()
    assert (out != run(native(), plain, found, biased, x, [])).any()


@pytest.mark.parametrize("to", [-4, 2, "end"])
def test_biases_outside_the_arena_are_refused(to: int | str) -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 2)
    biased = with_biases(rng, layer, table)
    assert biased.biases is not None
    biased.biases[0, 2] = biased.arena.size - 60 if to == "end" else to
    with pytest.raises(ValueError, match="out of range"):
        run(native(), layer, routing(rng, 1, 16, 2, 2), biased, gaussian(rng, 1, 16), [])


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


def test_waits_are_written_down() -> None:
    rng = generator(2)
    layer, table = experts(rng, F32, 16, 16, 2)
    found = routing(rng, 1, 16, 2, 2)
    table.states[0] = LOADING
    kernels, pause = native(), threading.Event()
    kernels.waits = waits = np.zeros((64, 2), np.int64)

    def land() -> None:
        while not waits[0, 0]:  # until a wait has begun
            pause.wait(0.001)
        table.states[0] = READY

    thread = threading.Thread(target=land)
    thread.start()
    try:
        run(kernels, layer, found, table, gaussian(rng, 1, 16), [])
    finally:
        waits[0, 0] |= 1  # the thread ends in any case
        thread.join()
    begun, ended = waits[: kernels.num_waits].T
    assert len(begun) > 0
    assert (ended >= begun).all()


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
    table.parts[1, 2] += 4
    with pytest.raises(ValueError, match="out of range"):
        run(native(), layer, found, table, gaussian(rng, 1, 16), [])


@settings(max_examples=examples(40), deadline=None)
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
