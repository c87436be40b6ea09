"""Statistics of a few noisy rounds: medians, and how sure one may be of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.90
_RESAMPLES = 2000
_SEED = 0  # the same rounds always give the same interval

Interval = tuple[float, float]


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the middle two."""
    return float(np.median(values))


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The percentile bootstrap interval of the median of `values [R]`."""
    return product_interval([values], level)


def quantile_interval(values: Sequence[float], share: float, level: float = LEVEL) -> Interval:
    """The same of another quantile: that below which a `share` of the values lies."""
    rng = np.random.default_rng(_SEED)
    drawn = np.asarray(values)[rng.integers(0, len(values), (_RESAMPLES, len(values)))]
    tail = (1 - level) / 2
    low, high = np.quantile(np.quantile(drawn, share, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def product_interval(cells: Sequence[Sequence[float]], level: float = LEVEL) -> Interval:
    """The percentile bootstrap interval of the geometric mean of the medians of several samples.

    Every sample is drawn anew, with replacement and at its own size, 2,000 times (B. Efron,
    "Bootstrap methods: another look at the jackknife", 1979).
    """
    rng = np.random.default_rng(_SEED)
    logs = np.mean([np.log(_medians(np.asarray(cell), rng)) for cell in cells], axis=0)
    tail = (1 - level) / 2
    low, high = np.exp(np.quantile(logs, [tail, 1 - tail]))
    return float(low), float(high)


def geometric_mean(values: Iterable[float]) -> float:
    """`(v_1 v_2 … v_n)^(1/n)` of positive values.

    Raises:
        ValueError: there are none, or one is not positive.
    """
    listed = list(values)
    if not listed or min(listed) <= 0:
        raise ValueError(f"a geometric mean needs positive values, not {listed}")
    return math.exp(math.fsum(map(math.log, listed)) / len(listed))


def _medians(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Medians `[2000]` of resampled `values [R]`."""
    chosen = rng.integers(0, len(values), (_RESAMPLES, len(values)))
    medians: NDArray[np.float64] = np.median(values[chosen], axis=1)
    return medians


def mean_interval(values: Sequence[float], block: int = 1, level: float = LEVEL) -> Interval:
    """The percentile bootstrap interval of the mean of `values [R]`, drawn in blocks of neighbours.

    Blocks keep together what depends on one another, such as tokens of one text (H. Künsch, "The
    jackknife and the bootstrap for general stationary observations", 1989). A short last block is
    drawn like any other.
    """
    found = np.asarray(values, np.float64)
    starts = np.arange(0, len(found), block)
    sums, counts = np.add.reduceat(found, starts), np.diff([*starts, len(found)])
    rng = np.random.default_rng(_SEED)
    chosen = rng.integers(0, len(starts), (_RESAMPLES, len(starts)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
