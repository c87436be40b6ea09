"""The library's own exponential against float64."""

import numpy as np

from tests.kernels.builders import assert_same_bits, native, variants


def test_exp_is_accurate_to_two_ulp() -> None:
    x = np.concatenate([np.linspace(-104, 88.7, 400_001), np.linspace(-1, 1, 100_001)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found = native().exp(x)
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(found - exact) / ulp).max() <= 2


def test_exp_at_the_edges() -> None:
    x = np.array([-np.inf, -1e30, -104.1, 0.0, -0.0, 1e-45, 89, 1e30, np.inf, np.nan], np.float32)
    wanted = np.array([0, 0, 0, 1, 1, 1, np.inf, np.inf, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(native().exp(x), wanted)


def test_exp_has_the_same_bits_everywhere() -> None:
    x = np.linspace(-110, 95, 20_003, dtype=np.float32)
    for kernels in variants("int16"):
        assert_same_bits(kernels.exp(x), native().exp(x))
