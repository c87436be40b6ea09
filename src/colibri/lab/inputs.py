"""The inputs on which errors are measured, and the error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Floats

_OUTLIER_SHARE, _OUTLIER = 0.01, 8.0
_CHANNEL = 1000.0


def gaussian(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    """Normal numbers `[T, K]`."""
    return rng.standard_normal((rows, columns), np.float32)


def outliers(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    """Normal numbers, one in a hundred of them times 8."""
    x = gaussian(rng, rows, columns)
    large = rng.random((rows, columns)) < _OUTLIER_SHARE
    return np.asarray(np.where(large, x * np.float32(_OUTLIER), x))


def swiglu(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    """What the down projection meets: `silu(g) * u` of normal g and u; heavy tails."""
    gate, up = gaussian(rng, rows, columns), gaussian(rng, rows, columns)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def one_channel(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    """Normal numbers, one column of them times 1000."""
    x = gaussian(rng, rows, columns)
    x[:, int(rng.integers(columns))] *= np.float32(_CHANNEL)
    return x


KINDS: dict[str, Callable[[np.random.Generator, int, int], Floats]] = {
    "gaussian": gaussian,
    "outliers": outliers,
    "swiglu": swiglu,
    "one_channel": one_channel,
}


def rms_error(found: Floats, weights: NDArray[np.float64], x: Floats) -> float:
    """Root mean square of the error of `found [T, N]`, over that of the exact `x W^T`.

    Args:
        found: what a kernel made of it.
        weights: `[N, K]`, exact.
        x: `[T, K]`.
    """
    exact = x.astype(np.float64) @ weights.T
    error = np.sqrt(np.mean(np.square(found - exact)))
    return float(error / np.sqrt(np.mean(np.square(exact))))
