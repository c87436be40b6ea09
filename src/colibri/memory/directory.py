"""Which experts would be in memory: a store without bytes, for shadows and for traces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import Keys, Ranking


class Directory:
    """`capacity` places for keys, given up by a ranking."""

    def __init__(self, num_keys: int, capacity: int, keys: Keys | None = None) -> None:
        """Empty, or holding `keys [n]` (n <= capacity, all different)."""
        self._place: NDArray[np.int64] = np.full(num_keys, -1)
        self._keys: Keys = np.full(capacity, -1)
        self._size = 0
        if keys is not None:
            self._put(keys, np.arange(len(keys)))
            self._size = len(keys)

    def missing(self, keys: Keys) -> int:
        """How many of `keys` are not there."""
        return int(np.count_nonzero(self._place[keys] < 0))

    def access(self, keys: Keys, ranking: Ranking) -> int:
        """Use `keys [n]` (n <= capacity, all different) at once; how many were missed.

        The ranking has been told of the use.
        """
        places = self._place[keys]
        present = places >= 0
        n = len(keys) - int(np.count_nonzero(present))
        if n:
            free = min(n, len(self._keys) - self._size)
            taken = np.arange(self._size, self._size + free)
            self._size += free
            if n > free:
                taken = np.concatenate([taken, self._give_up(n - free, places[present], ranking)])
            self._put(keys[~present], taken)
        return n

    def _give_up(self, n: int, held: NDArray[np.int64], ranking: Ranking) -> NDArray[np.int64]:
        """`n` places of the lowest keys that are not `held`."""
        scores = ranking.scores()[self._keys].astype(np.float64)
        scores[held] = np.inf
        scores[self._keys < 0] = np.inf  # those just taken
        taken: NDArray[np.int64] = np.argpartition(scores, n - 1)[:n]
        self._place[self._keys[taken]] = -1
        return taken

    def _put(self, keys: Keys, places: NDArray[np.int64]) -> None:
        self._keys[places] = keys
        self._place[keys] = places
