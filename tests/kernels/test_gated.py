"""Streams between gates: numbers against the reference, and the same bits however rows arrive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from colibri.formats import Floats
from colibri.kernels.api import Kernels
from colibri.kernels.recurrent_api import GroupNorm
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


def all_of(kernels: Kernels, x: Floats, y: Floats, weights: Floats) -> list[Floats]:
    """Each operation on the same rows; `y` is as wide as one stream."""
    num, width = weights.shape[1], y.shape[1]
    norm = GroupNorm(width, 1e-6, np.float32(1) + weights[0].repeat(width))
    written = x.copy()
    kernels.write_gated(weights, y, written)
    return [
        kernels.read_gated(x, written, num),
        written,
        kernels.match_streams(x, written, num),
        kernels.norm_rows(norm, x),
    ]


@given_settings(max_examples=examples(40))
@given(
    num=st.integers(1, 5),
    width=st.integers(1, 70),
    rows=st.integers(0, 9),
    cut=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_streams(num: int, width: int, rows: int, cut: int, seed: int) -> None:
    rng = generator(seed)
    x, y = gaussian(rng, rows, num * width), gaussian(rng, rows, width)
    weights = gaussian(rng, max(rows, 1), num)[:rows]
    if not rows:
        assert native().read_gated(x, x, num).shape == (0, width)
        assert REFERENCE.read_gated(x, x, num).shape == (0, width)
        return
    wanted, found = all_of(REFERENCE, x, y, weights), all_of(native(), x, y, weights)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-5)
    for kernels in variants("int16"):
        for one, other in zip(all_of(kernels, x, y, weights), found, strict=True):
            assert_same_bits(one, other)
    for rows_of in (slice(0, cut), slice(cut, rows)):
        part = x[rows_of].copy()
        if len(part):
            native().write_gated(weights[rows_of].copy(), y[rows_of].copy(), part)
            assert_same_bits(part, found[1][rows_of])


def test_gates_that_are_open_and_shut() -> None:
    """The mean of the streams that are let through."""
    x = np.arange(6, dtype=np.float32).reshape(1, 6)
    gate = np.array([[100, 100, -100, 100, 100, -100]], np.float32)
    np.testing.assert_allclose(native().read_gated(x, gate, 2), [[1.5, 2.5, 0]], atol=1e-6)


@pytest.mark.parametrize("kernels", [REFERENCE, native()], ids=lambda k: k.name)
def test_norm_weights_of_every_stream(kernels: Kernels) -> None:
    weights = np.array([1, 2, 3, 4], np.float32)
    found = kernels.norm_rows(GroupNorm(2, 0.0, weights), np.ones((3, 4), np.float32))
    np.testing.assert_allclose(found, np.tile(weights, (3, 1)), rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(ValueError, match="do not hold 4 streams"):
        native().read_gated(x, x, 4)
    with pytest.raises(ValueError, match="y must be"):
        native().write_gated(np.zeros((2, 3), np.float32), x, x)
    with pytest.raises(ValueError, match="4 norm weights do not fit"):
        native().norm_rows(GroupNorm(2, 1e-6, np.ones(4, np.float32)), x)
