"""FP8 with block scales, held to the text of its module."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import NumericsError
from colibri.formats import FP8_B16, FP8_B32, FP8_B64, FP8_B128, FP8Format
from colibri.formats.fp8 import E4M3, round_e4m3

each_format = pytest.mark.parametrize("fmt", [FP8_B128, FP8_B64, FP8_B32, FP8_B16], ids=repr)
shapes = st.tuples(st.integers(1, 140), st.integers(1, 140))


def number(code: int) -> float:
    """An E4M3 code, bit by bit."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def test_every_code() -> None:
    wanted = np.array([number(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(E4M3, wanted)
    assert np.signbit(E4M3[128])
    finite = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8)
    np.testing.assert_array_equal(round_e4m3(E4M3[finite]), finite)


@given(st.floats(-448, 448, width=32))
def test_rounding_is_to_the_nearest_and_to_even(value: float) -> None:
    found = int(round_e4m3(np.array([value], np.float32))[0])
    distances = np.abs(E4M3.astype(np.float64) - value)
    least = np.nanmin(distances)
    assert distances[found] == least
    ties = [code for code in range(256) if distances[code] == least and E4M3[code] != 0]
    assert found % 2 == 0 or len(ties) <= 1


@each_format
@settings(max_examples=20)
@given(shapes, st.integers(0, 2**32 - 1))
def test_sizes_and_values(fmt: FP8Format, shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3)).astype(np.float32)
    stored = fmt.encode(weights)
    blocks = (-(-shape[0] // fmt.block), -(-shape[1] // fmt.block))
    codes = (shape[0] * shape[1] + 3) // 4 * 4
    assert stored.size == fmt.nbytes(shape) == fmt.resident_nbytes(shape)
    assert stored.size == codes + 4 * blocks[0] * blocks[1]
    assert fmt.pack(stored, shape) is stored
    found = fmt.decode(stored, shape)
    scales = stored[codes:].view("<f4").reshape(blocks)
    for row, column in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)]:
        code = np.float32(number(int(stored[row * shape[1] + column])))
        assert found[row, column] == code * scales[row // fmt.block, column // fmt.block]
    largest = np.abs(weights).max()
    assert (np.abs(found - weights) <= np.abs(weights) / 15.9 + largest * 2.0**-17).all()


@each_format
def test_join_keeps_codes_and_scales(fmt: FP8Format) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (fmt.block + 3, 50), np.uint8)
    scales = rng.random((2, -(-50 // fmt.block)), np.float32)
    found_codes, found_scales = fmt.split(fmt.join(codes, scales), (fmt.block + 3, 50))
    np.testing.assert_array_equal(found_codes, codes)
    np.testing.assert_array_equal(found_scales, scales)


@each_format
def test_nan_codes_are_nan(fmt: FP8Format) -> None:
    codes = np.zeros((3, 20), np.uint8)
    codes[0, 4], codes[2, 19] = 0x7F, 0xFF
    found = fmt.decode(fmt.join(codes, np.ones((1, -(-20 // fmt.block)), np.float32)), (3, 20))
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [[0, 4], [2, 19]])


@each_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_has_no_code_is_refused(fmt: FP8Format, value: float) -> None:
    weights = np.ones((4, 5), np.float32)
    weights[2, 3] = value
    with pytest.raises(NumericsError, match=r"\[2, 3\]"):
        fmt.encode(weights)


@each_format
def test_zeros_stay_zero(fmt: FP8Format) -> None:
    assert not fmt.decode(fmt.encode(np.zeros((9, 70), np.float32)), (9, 70)).any()
