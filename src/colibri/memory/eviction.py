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
    """Gives up what was used longest ago; within one lease, the lower expert counts as older."""

    def __init__(self, num_keys: int) -> None:
        """`num_keys` is layers times experts."""
        self._stamps = np.zeros(num_keys, np.int64)
        self._clock = 1

    def touch(self, keys: Keys) -> None:
        """Stamps are unique: victims never depend on how ties are broken."""
        self._stamps[keys] = np.arange(self._clock, self._clock + len(keys))
        self._clock += len(keys)

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """The n oldest stamps; experts that were never touched first, by key."""
        stamps = self._stamps[allowed]
        never = stamps == 0
        stamps[never] = allowed[never] - len(self._stamps)
        oldest = np.argpartition(stamps, n - 1)[:n] if n < len(stamps) else np.arange(len(stamps))
        return oldest[np.argsort(stamps[oldest])]
