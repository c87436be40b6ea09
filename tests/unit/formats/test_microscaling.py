"""MXFP4, held to the text of its module: codes, scales, panels, padding, error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import NumericsError
from colibri.formats import MXFP4, Floats
from colibri.formats.microscaling import power_of_two

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
shapes = st.tuples(st.integers(1, 20), st.integers(1, 150))
seeds = st.integers(0, 2**32 - 1)


def random(shape: tuple[int, int], seed: int) -> Floats:
    """Weights whose rows differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-4, 3, (shape[0], 1))
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


def through(weights: Floats) -> Floats:
    """Encoded, packed and decoded."""
    shape = (weights.shape[0], weights.shape[1])
    return MXFP4.decode(MXFP4.pack(MXFP4.encode(weights), shape), shape)


def numbers(stored: bytes, shape: tuple[int, int]) -> list[list[float]]:
    """Stored bytes read one by one."""
    rows, columns = -(-shape[0] // 8) * 8, -(-shape[1] // 32) * 32
    out = []
    for row in range(shape[0]):
        line = []
        for k in range(shape[1]):
            code = stored[(row * columns + k) // 2] >> 4 * (k % 2) & 15
            scale = stored[rows * columns // 2 + row * columns // 32 + k // 32]
            value = VALUES[code & 7] * 2.0 ** (scale - 127)
            line.append(-value if code & 8 else value)
        out.append(line)
    return out


@settings(max_examples=20)
@given(shapes, seeds)
def test_decode_is_what_the_bytes_say(shape: tuple[int, int], seed: int) -> None:
    stored = MXFP4.encode(random(shape, seed))
    rows, columns = -(-shape[0] // 8) * 8, -(-shape[1] // 32) * 32
    assert stored.size == MXFP4.nbytes(shape) == MXFP4.resident_nbytes(shape)
    assert stored.size == rows * columns // 2 + rows * columns // 32
    assert MXFP4.panel_nbytes(shape[1]) * rows // 8 == stored.size
    found = MXFP4.decode(MXFP4.pack(stored, shape), shape)
    assert found.tolist() == numbers(stored.tobytes(), shape)


@settings(max_examples=10)
@given(shapes, seeds)
def test_resident_layout(shape: tuple[int, int], seed: int) -> None:
    """Chunk by chunk: lane r holds row r, low nibbles first."""
    stored = MXFP4.encode(random(shape, seed))
    resident = MXFP4.pack(stored, shape)
    columns, size = -(-shape[1] // 32) * 32, MXFP4.panel_nbytes(shape[1])
    for row in range(shape[0]):
        panel = resident[row // 8 * size : (row // 8 + 1) * size]
        for k in range(columns):
            byte = panel[columns // 4 + k // 8 * 32 + row % 8 * 4 + k % 4]
            code = byte & 15 if k % 8 < 4 else byte >> 4
            assert code == stored[(row * columns + k) // 2] >> 4 * (k % 2) & 15


@settings(max_examples=20)
@given(shapes, seeds)
def test_error_bound(shape: tuple[int, int], seed: int) -> None:
    """Root mean square: half the widest step, or what the largest weights lose beyond 6."""
    weights = random(shape, seed)
    error = through(weights).astype(np.float64) - weights
    for start in range(0, shape[1], 32):
        group = slice(start, start + 32)
        largest = np.abs(weights[:, group]).max(axis=1)
        assert (np.sqrt(np.square(error[:, group]).mean(axis=1)) <= largest / 4).all()


def test_numbers_of_the_format_come_back() -> None:
    """Groups whose largest value is 4 or 6 times a power of two are kept."""
    rng = np.random.default_rng(0)
    values = np.array([*VALUES, *(-v for v in VALUES[1:])], np.float32)
    weights = rng.choice(values, (16, 96))
    weights[:, ::32] = rng.choice(np.array([4, -6], np.float32), (16, 3))
    weights = np.ldexp(weights, rng.integers(-20, 20, (16, 1))).astype(np.float32)
    np.testing.assert_array_equal(through(weights), weights)


def test_scales_at_the_edges() -> None:
    found = power_of_two(np.array([0, 1, 127, 254, 255], np.uint8))
    wanted = np.array([2.0**-127, 2.0**-126, 1, 2.0**127, np.nan], np.float32)
    np.testing.assert_array_equal(found, wanted)
    stored = MXFP4.encode(np.ones((8, 32), np.float32))
    stored[-8:] = 255
    assert np.isnan(MXFP4.decode(MXFP4.pack(stored, (8, 32)), (8, 32))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_has_no_code_is_refused(value: float) -> None:
    weights = np.ones((4, 40), np.float32)
    weights[2, 33] = value
    with pytest.raises(NumericsError, match=r"\[2, 33\]"):
        MXFP4.encode(weights)


def test_zeros_stay_zero() -> None:
    assert not through(np.zeros((3, 70), np.float32)).any()
