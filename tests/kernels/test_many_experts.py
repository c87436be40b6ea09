"""Layers of up to 513 experts, of which a token takes any number, up to all of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import FORMATS, Floats
from colibri.kernels.api import Activations, Experts, Kernels, Routing, Slots
from colibri.kernels.native import NativeKernels, instruction_sets
from tests.examples import examples
from tests.kernels.builders import (
    ERROR,
    LIMITS,
    REFERENCE,
    assert_close,
    assert_same_bits,
    experts,
    generator,
    routing,
    slots_of,
)

MOST = 513
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 257)
HIDDEN, UNITS = 33, 13  # whole groups of no format, whole panels of neither matrix


@cache
def wide(isa: str, threads: int) -> NativeKernels:
    kernels = NativeKernels(threads=threads, activations=Activations.INT16, isa=isa)
    kernels.reserve(replace(LIMITS, rows=max(ROWS), num_experts=MOST, num_experts_per_tok=MOST))
    return kernels


def step(kernels: Kernels, layer: Experts, found: Routing, table: Slots) -> Floats:
    y = np.zeros_like(found.hidden)
    kernels.moe_step(layer, found, found.experts, slots_of(layer, found.experts), table, y)
    return y


@settings(max_examples=examples(25), deadline=None)
@given(
    fmt=st.sampled_from(["int4-g64", "mxfp4", "fp8-e4m3-b128", "bf16"]).map(FORMATS.__getitem__),
    num=st.one_of(st.integers(1, MOST), st.sampled_from([1, 64, 257, MOST])),
    rows=st.sampled_from(ROWS),
    everywhere=st.booleans(),
    data=st.data(),
)
def test_any_number_of_experts_and_of_rows_each(
    fmt: Any, num: int, rows: int, everywhere: bool, data: Any
) -> None:
    """`everywhere`: every token takes all experts, so that each has `rows` rows."""
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    num = min(num, 40) if everywhere and rows > 33 else num
    layer, table = experts(rng, fmt, HIDDEN, UNITS, num)
    active = num if everywhere else data.draw(st.integers(1, min(num, 8)))
    found = routing(rng, rows, HIDDEN, num, active)
    isas = instruction_sets()
    y = step(wide(isas[0], 1), layer, found, table)
    error = ERROR["int16"] if fmt.is_coded else ERROR["float32"]
    assert_close(y, step(REFERENCE, layer, found, table), 2 * error)
    for kernels in (wide(isas[0], 2), wide(data.draw(st.sampled_from(isas)), 1)):
        assert_same_bits(step(kernels, layer, found, table), y)
