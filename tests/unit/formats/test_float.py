"""Float formats: exact where they can be, rounded to nearest even where not."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.formats import BF16, F16, F32, PANEL_ROWS, FloatFormat

ALL = [F32, F16, BF16]
HALVES = [F16, BF16]
EVERY_HALF = np.arange(2**16, dtype=np.uint16)


def through(fmt: FloatFormat, weights: np.ndarray) -> np.ndarray:
    """Encoded, packed and decoded."""
    stored = fmt.encode(weights)
    assert stored.dtype == np.uint8
    assert stored.shape == (fmt.nbytes(weights.shape),)
    return fmt.decode(fmt.pack(stored, weights.shape), weights.shape)


def bits_of(value: float) -> int:
    """The pattern of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@pytest.mark.parametrize("fmt", ALL, ids=repr)
@given(st.integers(1, 20), st.integers(1, 20))
def test_sizes(fmt: FloatFormat, rows: int, columns: int) -> None:
    item = {"f32": 4, "f16": 2, "bf16": 2}[fmt.name]
    assert fmt.nbytes((rows, columns)) == rows * columns * item
    assert fmt.resident_nbytes((rows, columns)) == rows * columns * item
    assert fmt.panel_nbytes(columns) == PANEL_ROWS * columns * item


@pytest.mark.parametrize("fmt", HALVES, ids=repr)
def test_every_half_survives(fmt: FloatFormat) -> None:
    """Infinities, denormals and -0 with their bits; a NaN as a NaN."""
    wide = fmt.decode(EVERY_HALF.view(np.uint8), (256, 256))
    back = fmt.encode(wide).view(np.uint16)
    is_nan = np.isnan(wide).reshape(-1)
    assert np.array_equal(back[~is_nan], EVERY_HALF[~is_nan])
    assert np.isnan(fmt.decode(back.view(np.uint8), (256, 256)).reshape(-1)[is_nan]).all()
    assert is_nan.sum() == {"f16": 2 * 1023, "bf16": 2 * 127}[fmt.name]


@given(st.lists(st.floats(width=32), min_size=6, max_size=6))
def test_float32_keeps_bits(values: list[float]) -> None:
    weights = np.array(values, np.float32).reshape(2, 3)
    assert np.array_equal(through(F32, weights).view(np.uint32), weights.view(np.uint32))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_the_nearer_neighbour(value: float) -> None:
    """Of the two neighbours the nearer, of two equally near the even one."""
    below = bits_of(abs(value)) & 0xFFFF0000
    low = struct.unpack("<f", struct.pack("<I", below))[0]
    high = (
        2.0**128
        if below == 0x7F7F0000
        else struct.unpack("<f", struct.pack("<I", below + 0x10000))[0]
    )
    to_low, to_high = abs(value) - low, high - abs(value)
    is_even = (below >> 16) % 2 == 0
    nearest = low if to_low < to_high or (to_low == to_high and is_even) else high
    wanted = math.copysign(math.inf if nearest == 2.0**128 else nearest, value)
    found = float(through(BF16, np.array([[value]], np.float32))[0, 0])
    assert bits_of(found) == bits_of(wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (65504.0, 65504.0),
        (65519.0, 65504.0),
        (65520.0, math.inf),
        (-65520.0, -math.inf),
        (2.0**-24, 2.0**-24),
        (2.0**-25, 0.0),
        (3 * 2.0**-26, 2.0**-24),
        (-(2.0**-26), -0.0),
        (-0.0, -0.0),
        (1 + 2.0**-11, 1.0),
        (1 + 3 * 2.0**-11, 1 + 2.0**-9),
    ],
)
def test_f16_extremes(value: float, wanted: float) -> None:
    found = float(through(F16, np.array([[value]], np.float32))[0, 0])
    assert bits_of(found) == bits_of(wanted)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_bf16_never_turns_nan_into_a_number(bits: int) -> None:
    value = np.array([[bits]], np.uint32).view(np.float32)
    assert np.isnan(through(BF16, value)).all()


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test_storage_is_row_major_whatever_the_source_is(fmt: FloatFormat) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(fmt.encode(np.asfortranarray(weights)), fmt.encode(weights))
    items = fmt.encode(weights).view(fmt.dtype)
    assert np.array_equal(fmt.to_float32(items), np.arange(12))
