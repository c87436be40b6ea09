"""Which expert makes room for another. Keys number experts: MoE layer times E plus expert.

A ranking scores keys, and whoever has the lowest score goes first. Scores depend on what was used
and when, never on how much room there is, and no two are equal: so what a smaller arena holds, a
larger one holds as well, and more memory never reads more (Mattson et al., 1970, "Evaluation
techniques for storage hierarchies"). `policies_duel` gives that up for the better of two rankings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int64]
Scores: TypeAlias = NDArray[np.float64] | NDArray[np.int64]

_EPSILON = 2.0**-40  # tells keys of equal history apart; far below any difference that matters
_LARGEST_GAIN = 2.0**400
_MOST_PENDING = 64  # touches put by


class Policy(Protocol):
    """Decides evictions; knows keys, never slots, so that it can be scored on traces alone."""

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """Experts `keys [n]`, all different and of one layer, are used now.

        It comes before room is made for those that are not there: whoever gives way to them is
        chosen knowing what this layer used, and what it did not.
        `missed` of them were not kept since their last use: they had to be read, on demand or
        ahead of it. The array stays as it is from now on.
        """

    def hint(self, keys: Keys) -> None:
        """Experts `keys [n]` are expected to be needed soon, within a token."""

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """Indices into `allowed [m]` (m >= n, all different) of the `n` experts to give up."""


class Ranking(Protocol):
    """Scores that depend on what was used and when, and on nothing else."""

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """Experts `keys [n]`, all different and of one layer, are used now."""

    def scores(self) -> Scores:
        """Of every key, all different; the lowest goes first. Valid until the next call."""


def lowest(n: int, scores: Scores) -> NDArray[np.intp]:
    """Indices of the `n` lowest of `scores [m]`, ascending by score."""
    found = np.argpartition(scores, n - 1)[:n] if 0 < n < len(scores) else np.arange(len(scores))
    ascending: NDArray[np.intp] = found[np.argsort(scores[found])]
    return ascending[:n]


class LRU:
    """Gives up what was used longest ago; of experts last used together, the lower key first."""

    def __init__(self, num_keys: int) -> None:
        """`num_keys` is layers times experts."""
        self._ages = np.arange(num_keys)  # clock * num_keys + key
        self._clock = 0
        self._pending: list[Keys] = []  # touches that nobody has asked about yet

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """They are the most recent now."""
        self._pending.append(keys)
        if len(self._pending) >= _MOST_PENDING:
            self._catch_up()

    def hint(self, keys: Keys) -> None:
        """Recency knows nothing of the future."""

    def scores(self) -> Scores:
        """The oldest is lowest; experts that were never touched are below all others."""
        return self._catch_up()

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """The n oldest; experts that were never touched go first."""
        return lowest(n, self._catch_up()[allowed])

    def missed(self, keys: Keys, capacities: Sequence[int]) -> list[int]:
        """How many of `keys` LRU would miss with each of `capacities`.

        With room for n experts it holds the n last used.
        """
        ages = self._catch_up()
        last = [max(0, len(ages) - capacity) for capacity in capacities]
        oldest = np.maximum(np.partition(ages, last)[last], len(ages))  # below: never touched
        missed: list[int] = (ages[keys] < oldest[:, None]).sum(axis=1).tolist()
        return missed

    def _catch_up(self) -> NDArray[np.int64]:
        """Ages, after all touches so far."""
        for keys in self._pending:
            self._clock += len(self._ages)
            self._ages[keys] = keys + self._clock
        self._pending.clear()
        return self._ages


class LFU:
    """Gives up what was used least, each use counting half as much after `half_life` touches.

    Instead of shrinking all counts at every touch, what a use adds grows.
    """

    def __init__(self, num_keys: int, half_life: float) -> None:
        """`num_keys` is layers times experts; a token touches each layer once."""
        numbers = np.arange(num_keys)
        # Never used: the lower key first.
        self._heat: NDArray[np.float64] = np.multiply(numbers, 2.0**-1000, dtype=np.float64)
        self._distinct = 1 + numbers * _EPSILON
        self._gain, self._growth = 1.0, 2 ** (1 / half_life)

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """They are hotter now."""
        self._gain *= self._growth
        if self._gain > _LARGEST_GAIN:
            self._heat /= self._gain
            self._gain = 1.0
        self._heat[keys] += self._gain * self._distinct[keys]

    def hint(self, keys: Keys) -> None:
        """Frequency knows nothing of the future."""

    def scores(self) -> Scores:
        """The coldest is lowest."""
        return self._heat

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """The n coldest."""
        return lowest(n, self._heat[allowed])
