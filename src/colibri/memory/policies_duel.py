"""The default policy, "mixed": the forecast, unless plain recency would miss less.

LRU's misses need no second directory: an expert would be there if it is among the `capacity` last
used. That is looked up for a sample of the requests. Should the forecast fall behind by more than a
set number of misses, LRU decides, while a shadow directory shows what the forecast would have
missed; it takes over again when it has made up as much. So it never loses more than that number
and the change-over, and equal skill costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.memory.directory import Directory
from colibri.memory.eviction import LRU, Keys, Ranking
from colibri.memory.policies_forecast import Forecast

_STRIDE = 0x9E3779B1  # 2^32 / golden ratio: samples are spread evenly, whatever the period
_KEYS_A_LOOK = 64  # looking up LRU's misses costs as much as reading this many ages, on average
_LEAST_LIMIT = 12  # misses
_RETURN = 2  # times the limit: what the forecast must have made up


class Duel:
    """Decides by `forecast` or by LRU, for `capacity` slots.

    Attributes:
        fallen_back: whether LRU decides now.
    """

    def __init__(self, forecast: Forecast, lru: LRU, num_keys: int, capacity: int) -> None:
        self.fallen_back = False
        self._forecast, self._lru = forecast, lru
        self._num_keys, self._capacity = num_keys, capacity
        self._share = min(1.0, _KEYS_A_LOOK / num_keys)
        self._sizes = (capacity,)
        # With room for all there is nothing to compare.
        self._tick, self._bar = 0, int(self._share * 2**32) if capacity < num_keys else -1
        self._limit = max(_LEAST_LIMIT, capacity // 4) * self._share
        self._behind = 0.0  # misses of the deciding ranking less those of the other
        self._shadow: Directory | None = None

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """Tell both, and compare them now and then."""
        recent = self.missed_by_lru(keys)
        self._forecast.touch(keys)
        self._lru.touch(keys)
        if recent is not None or self._shadow is not None:
            self.book(keys, missed, recent)

    def hint(self, keys: Keys) -> None:
        """Only the forecast can use it."""
        self._forecast.hint(keys)

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """As the one that decides has it."""
        return (self._lru if self.fallen_back else self._forecast).victims(n, allowed)

    @property
    def ranking(self) -> Ranking:
        """The one that decides."""
        return self._lru if self.fallen_back else self._forecast

    def missed_by_lru(self, keys: Keys) -> int | None:
        """How many of `keys`, not touched yet, LRU misses; None where nobody wants to know."""
        return self._lru.missed(keys, self._sizes)[0] if self._due() else None

    def _due(self) -> bool:
        self._tick = (self._tick + _STRIDE) & 0xFFFFFFFF
        return self._tick <= self._bar

    def book(self, keys: Keys, missed: int, missed_by_lru: int | None) -> None:
        """`missed` of `keys`, which both know of by now, were not kept."""
        if self._shadow is not None:
            missed = self._shadow.access(keys, self._forecast)
        if missed_by_lru is None:
            return
        difference = missed - missed_by_lru
        self._behind += -difference if self.fallen_back else difference
        self._behind = max(self._behind, 0.0)
        if self._behind > self._limit * (_RETURN if self.fallen_back else 1):
            self._change_over()

    def _change_over(self) -> None:
        self.fallen_back = not self.fallen_back
        self._behind = 0.0
        self._shadow = None
        if self.fallen_back:
            recent = np.argsort(self._lru.scores())[-self._capacity :]
            self._shadow = Directory(self._num_keys, self._capacity, recent)
