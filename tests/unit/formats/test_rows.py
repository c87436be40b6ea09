"""8-bit rows: one scale for each, and nothing lost but half a step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colibri.formats import INT8_ROWS


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_rows(rows: int, columns: int, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    stored = INT8_ROWS.encode(weights)
    assert stored.size == INT8_ROWS.nbytes((rows, columns)) == rows * (columns + 4)
    found = INT8_ROWS.decode(INT8_ROWS.pack(stored, (rows, columns)), (rows, columns))
    step = np.abs(weights).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - weights) <= step * 0.501).all()


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    weights = np.zeros((3, 4), np.float32)
    weights[1, 2], weights[2, 0] = np.nan, np.inf
    found = INT8_ROWS.decode(INT8_ROWS.encode(weights), (3, 4))
    assert not found[0].any()
    assert np.isnan(found[1:]).all()
