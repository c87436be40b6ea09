"""Lookahead: what the next layers will probably want is read while this one computes.

The predictor is a callable, such as the next layer's router on this layer's state. It is asked only
in steps of few tokens: large ones want nearly everything, which needs no prediction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from colibri.kernels.api import Ints
from colibri.memory.expert_store import ExpertStore
from colibri.memory.governor import Governor

Predict: TypeAlias = Callable[[int], Ints]  # a layer -> its experts, likeliest first
PrefetchMode: TypeAlias = Literal["auto", "on", "off"]
PREFETCH_MODES = ("auto", "on", "off")

_MOST_ROWS = 8
_ALWAYS = 1  # layers looked ahead where the settings say "on"
_QUIET_STEPS = 8  # without a read, after which there is nothing to be gained


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadStats:
    """How good predictions were.

    Attributes:
        steps: steps that looked ahead.
        predictions: that were put to the test, one or two layers ahead.
        wanted: experts that these layers then used.
        foreseen: those of them that were predicted.
        wanted_by_two: of `wanted`, what was predicted two layers before.
        foreseen_by_two: of `foreseen`, the same.
    """

    steps: int = 0
    predictions: int = 0
    wanted: int = 0
    foreseen: int = 0
    wanted_by_two: int = 0
    foreseen_by_two: int = 0

    @property
    def recall(self) -> float | None:
        """Share of the experts used that the layer before had predicted; None before any."""
        return _share(self.foreseen - self.foreseen_by_two, self.wanted - self.wanted_by_two)

    @property
    def recall_by_two(self) -> float | None:
        """The same, of predictions two layers before."""
        return _share(self.foreseen_by_two, self.wanted_by_two)


class Prefetcher:
    """Turns predictions into reads, where the governor finds that it pays."""

    def __init__(
        self,
        store: ExpertStore,
        layers: Sequence[int],
        mode: PrefetchMode = "auto",
        governor: Governor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`layers` are the sparse ones, ascending."""
        self.governor = governor or Governor()
        self._store, self._layers, self._mode, self._clock = store, list(layers), mode, clock
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._predicted: dict[tuple[int, int], list[int]] = {}  # by row and distance
        self._counts = [[0, 0, 0] for _ in range(3)]  # by distance: predictions, wanted, foreseen
        self._steps = self._num_rows = self._quiet = self._reads = 0
        self._depth = 0
        self._start = 0.0
        self._novelty = Novelty(store, len(self._layers))

    @property
    def stats(self) -> LookaheadStats:
        """Sums since the start."""
        predictions, wanted, foreseen = map(sum, zip(*self._counts, strict=True))
        return LookaheadStats(
            steps=self._steps,
            predictions=predictions,
            wanted=wanted,
            foreseen=foreseen,
            wanted_by_two=self._counts[2][1],
            foreseen_by_two=self._counts[2][2],
        )

    def begin(self, num_rows: int) -> bool:
        """A step of `num_rows` tokens begins; whether `look` is to be called at each layer."""
        if self._mode == "off" or num_rows > _MOST_ROWS or self._is_quiet():
            return False
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self.governor.restart()
        self._depth = _ALWAYS if self._mode == "on" else self.governor.depth
        self._steps += self._depth > 0
        self._predicted.clear()
        self._novelty.begin()
        self._start = self._clock()
        return True

    def look(self, layer: int, used: Ints, predict: Predict) -> None:
        """The layer uses `used [n]`, which are leased: now is the time to read for the next.

        Two layers ahead are looked at where the next one gives the drive nothing to do.
        """
        row = self._row[layer]
        experts = used.tolist()  # few: numbers of Python are faster than arrays
        self._novelty.use(row, experts)
        for distance in range(1, self._depth + 1):
            self._score(row, distance, experts)
        for distance in range(1, min(self._depth, len(self._layers) - 1 - row) + 1):
            ahead = self._layers[row + distance]
            coming = predict(ahead)
            self._predicted[row + distance, distance] = coming.tolist()
            if self._store.prefetch(ahead, coming):
                break

    def end(self) -> None:
        """The step is over; one that fails may leave this out."""
        if self._mode == "auto":
            self.governor.book(self._clock() - self._start, self._novelty.demand)

    def _is_quiet(self) -> bool:
        """Whether nothing has been read for a while."""
        reads = self._store.num_reads
        self._quiet = 0 if reads != self._reads else self._quiet + 1
        self._reads = reads
        return self._quiet > _QUIET_STEPS

    def _score(self, row: int, distance: int, used: list[int]) -> None:
        predicted = self._predicted.pop((row, distance), None)
        if predicted is not None:
            counts = self._counts[distance]
            counts[0] += 1
            counts[1] += len(used)
            counts[2] += len(set(used).intersection(predicted))


class Novelty:
    """What a step demands of the disk, whether or not something is read ahead.

    Counts experts that were not used for as many steps as fill the arena.

    Attributes:
        demand: of this step, so far.
    """

    def __init__(self, store: ExpertStore, num_layers: int) -> None:
        self._store = store
        self._last = [[-1] * store.num_experts for _ in range(num_layers)]
        self._step, self._used, self._horizon = 0, 1, 1
        self.demand = 0

    def begin(self) -> None:
        """A step begins."""
        self._horizon = max(1, self._store.num_usable // max(1, self._used))
        self._step += 1
        self._used = self.demand = 0

    def use(self, row: int, used: list[int]) -> None:
        """A layer, by its row, uses the experts `used`."""
        last, step, oldest = self._last[row], self._step, self._step - self._horizon
        for expert in used:
            self.demand += last[expert] < oldest
            last[expert] = step
        self._used += len(used)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
