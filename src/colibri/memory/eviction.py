"""Which expert makes room for another. Keys number experts: MoE layer times E plus expert."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int64]


class Policy(Protocol):
    """Decides evictions; knows keys, never slots, so that it can be scored on traces alone."""

    def touch(self, keys: Keys) -> None:
        """Experts `keys [n]`, all different, are used now."""

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """Indices into `allowed [m]` (m >= n, all different) of the `n` experts to give up."""


class LRU:
    """Gives up what was used longest ago; of experts last used together, the lower key first."""

    def __init__(self, num_keys: int) -> None:
        """`num_keys` is layers times experts."""
        self._stamps = np.zeros(num_keys, np.int64)
        self._clock = 0

    def touch(self, keys: Keys) -> None:
        """They are the most recent now."""
        self._clock += 1
        self._stamps[keys] = self._clock

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """The n oldest; experts that were never touched go first."""
        ages = self._stamps[allowed] * len(self._stamps) + allowed  # unique
        oldest = np.argpartition(ages, n - 1)[:n] if 0 < n < len(ages) else np.arange(n)
        return oldest[np.argsort(ages[oldest])]
