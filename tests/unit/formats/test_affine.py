"""Codes of 8 bits with a scale and a minimum for each group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import NumericsError
from colibri.formats import AFFINE_G16, AFFINE_G32, FORMATS, AffineFormat, padded
from tests.examples import examples

each_format = pytest.mark.parametrize("fmt", [AFFINE_G16, AFFINE_G32], ids=str)


@each_format
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 20), st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_joined_numbers_come_back(fmt: AffineFormat, rows: int, columns: int, seed: int) -> None:
    rng, full = np.random.default_rng(seed), (padded(rows, 8), padded(columns, 32))
    codes = rng.integers(-128, 128, full, np.int8)
    groups = (full[0], full[1] // fmt.group)
    scales = rng.standard_normal(groups).astype(np.float16).astype(np.float32)
    minima = rng.standard_normal(groups).astype(np.float32)
    resident = fmt.pack(fmt.join(codes, scales, minima), (rows, columns))
    wide = np.repeat(scales, fmt.group, axis=1) * codes + np.repeat(minima, fmt.group, axis=1)
    assert np.array_equal(fmt.decode(resident, (rows, columns)), wide[:rows, :columns])


@each_format
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 9), st.integers(1, 100), st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_rounding_is_to_nearest(
    fmt: AffineFormat, rows: int, columns: int, size: float, seed: int
) -> None:
    weights = (np.random.default_rng(seed).standard_normal((rows, columns)) * size).astype("f4")
    found = fmt.decode(fmt.pack(fmt.encode(weights), weights.shape), weights.shape)
    widest = np.abs(weights).max() * 2
    assert np.abs(found - weights).max() <= widest / 255 / 2 * 1.01


def test_names_say_the_group() -> None:
    assert FORMATS["int8-g16-affine"] is AFFINE_G16
    assert FORMATS["int8-g32-affine"] is AFFINE_G32


@each_format
def test_what_is_not_finite_has_no_code(fmt: AffineFormat) -> None:
    with pytest.raises(NumericsError, match=r"weight \[0, 1\] is nan"):
        fmt.encode(np.array([[0, np.nan]], np.float32))
