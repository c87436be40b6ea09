import numpy as np
import pytest

from colibri.lab.inputs import KINDS, rms_error


@pytest.mark.parametrize("kind", list(KINDS))
def test_kinds(kind: str) -> None:
    x = KINDS[kind](np.random.default_rng(0), 16, 512)
    assert x.shape == (16, 512)
    assert x.dtype == np.float32
    peak = float(np.abs(x).max() / np.sqrt(np.mean(np.square(x))))
    low, high = {
        "gaussian": (3, 6),
        "outliers": (10, 35),
        "swiglu": (6, 60),
        "one_channel": (20, 80),
    }[kind]
    assert low < peak < high


def test_one_channel_is_one() -> None:
    x = KINDS["one_channel"](np.random.default_rng(0), 64, 32)
    sizes = np.sqrt(np.mean(np.square(x), axis=0))
    assert (sizes > 100).sum() == 1


def test_rms_error() -> None:
    weights = np.array([[3.0, 0.0], [0.0, 4.0]])
    x = np.ones((1, 2), np.float32)
    assert rms_error(np.array([[3, 4]], np.float32), weights, x) == 0.0
    assert rms_error(np.array([[3, 9]], np.float32), weights, x) == pytest.approx(1.0)
