"""Rounds in which contenders take turns, so that what slows the machine down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Turn = Callable[[], float]  # does some work; returns its rate, in whatever unit
LEAST_PAIRS = 7


def alternate(turns: Sequence[Turn], rounds: int, pause_s: float = 0.0) -> NDArray[np.float64]:
    """Rates `[rounds, turns]`: a b c a b c …, after one round that does not count.

    `pause_s` lets threads that still spin for the one before go to sleep.
    """
    rates = np.zeros((rounds + 1, len(turns)))
    for row in rates:
        for index, turn in enumerate(turns):
            if pause_s:
                time.sleep(pause_s)
            row[index] = turn()
    return rates[1:]


@dataclass(slots=True)
class Ring:
    """Whoever comes next goes on where the last one stopped.

    So nothing is met again before everything else has passed, and no cache can serve it.

    Attributes:
        count: items in a circle.
    """

    count: int
    _next: int = field(default=0)

    def take(self, num: int) -> list[tuple[int, int]]:
        """The next `num` items, at most all, as ranges `[begin, end)`: two where the end is met."""
        num = min(num, self.count)
        begin, end = self._next, self._next + num
        self._next = end % self.count
        if end <= self.count:
            return [(begin, end)]
        return [(begin, self.count), (0, end - self.count)]


def items_for(seconds: float, run: Callable[[int], float], count: int) -> int:
    """How many items take about that long, at least 1, at most `count`; tried on ever more of them.

    `run(num)` does that many and returns the seconds it took.
    """
    num = 1
    while True:
        taken = run(num)
        if taken >= seconds / 4 or num >= count:
            return max(1, min(count, round(num * seconds / max(taken, 1e-9))))
        num = min(count, 4 * num)
