"""Whether reading ahead pays: measured on the machine, the model and the budget at hand.

What a read ahead hides shortens a step, what it takes from demand reads lengthens it, and so does
working out the predictions. All of it is in the time of a step. So steps with and without are
compared, in short windows that alternate. Steps also differ by how much they demand of the disk:
that share of their time is fitted, and taken out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_WINDOW = 6  # steps; the first is not counted, as it ends what the one before began
_WITHOUT_FIRST = (False, True, True, False)  # drift in either direction cancels out
_ROUNDS = 2  # of these, in a probe
_LEAST_REST, _MOST_REST = 16, 256  # windows between probes; doubled as long as nothing changes
_MARGIN = 0.01  # of a step's time: a smaller gain is none
_OUTLIER = 3.0  # times the median
_LEAST_SAMPLES = 8
_DOUBT = 2.0  # standard errors that a gain must exceed before it is believed

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gain:
    """What something saves, as a share of a step's time, and how far off that may be."""

    share: float
    error: float


@dataclass(slots=True)
class Trial:
    """Something that may be on or off for a step, and whether steps are faster with it.

    It starts off. Where a verdict is known from before, that holds until the first probe.

    Attributes:
        pays: the verdict.
        gain: of the last probe, or as known from before; None where there is none.
    """

    pays: bool = False
    gain: float | None = None
    _rest: int = 1
    _rested: int = 0
    _probe: deque[bool] = field(default_factory=deque)
    _steps: int = 0
    _samples: dict[bool, list[tuple[float, float]]] = field(
        default_factory=lambda: {False: [], True: []}
    )

    def __post_init__(self) -> None:
        """What is known is looked at again after a while."""
        if self.gain is not None:
            self._rest = _LEAST_REST

    @property
    def is_probing(self) -> bool:
        """Whether windows with and without alternate now."""
        return bool(self._probe)

    @property
    def choice(self) -> bool:
        """Whether it is on in the step that begins."""
        return self._probe[0] if self._probe else self.pays

    def book(self, seconds: float, demand: float) -> None:
        """That step took `seconds`; `demand` grows with the bytes it would have to wait for."""
        self._steps += 1
        if self._probe and self._steps > 1:
            self._samples[self._probe[0]].append((seconds, demand))
        if self._steps < _WINDOW:
            return
        self._steps = 0
        if self._probe:
            self._probe.popleft()
            if not self._probe:
                self._conclude()
        else:
            self._rested += 1
            if self._rested >= self._rest:
                self._probe.extend(_WITHOUT_FIRST * _ROUNDS)

    def restart(self) -> None:
        """Begin the window again: its steps are not alike."""
        self._steps = 0

    def _conclude(self) -> None:
        found = gain(self._samples[False], self._samples[True])
        self._samples = {False: [], True: []}
        paid, self._rested = self.pays, 0
        if found is not None:
            self.gain = found.share
            # To go on as before, it must pay; to begin, it must do so beyond doubt.
            doubt = 0.0 if paid else _DOUBT * found.error
            self.pays = found.share > max(_MARGIN, doubt)
        same = self.pays == paid and self._rest >= _LEAST_REST
        self._rest = min(_MOST_REST, 2 * self._rest) if same else _LEAST_REST


def gain(without: list[tuple[float, float]], trial: list[tuple[float, float]]) -> Gain | None:
    """How much faster steps of `trial` are, at the same demand; None where there are too few.

    Each is (seconds, demand). Seconds are taken to rise with demand by the same slope in both.
    """
    if min(len(without), len(trial)) < _LEAST_SAMPLES:
        return None
    groups = [_tamed(np.array(group)) for group in (without, trial)]
    means = [group.mean(axis=0) for group in groups]
    offsets = np.concatenate([group - mean for group, mean in zip(groups, means, strict=True)])
    seconds, demand = offsets.T
    spread = float(demand @ demand)
    slope = max(0.0, float(seconds @ demand) / spread) if spread > 0 else 0.0
    left = seconds - slope * demand
    error = float(np.sqrt(left @ left / (len(left) - 3) * sum(1 / len(g) for g in groups)))
    saved = float(means[0][0] - means[1][0] - slope * (means[0][1] - means[1][1]))
    return Gain(saved / float(means[0][0]), error / float(means[0][0]))


def _tamed(samples: Doubles) -> Doubles:
    """Steps `[n, 2]` that something else held up count as if it had not been for long."""
    samples[:, 0] = np.minimum(samples[:, 0], _OUTLIER * np.median(samples[:, 0]))
    return samples


class Governor:
    """Decides how many layers are looked ahead at most: none, one or two.

    Attributes:
        first: one layer against none.
        second: two layers against one; it is tried where the first pays.
    """

    def __init__(self, first: Trial | None = None, second: Trial | None = None) -> None:
        """Begin with what is known from before, by default nothing."""
        self.first, self.second = first or Trial(), second or Trial()

    @property
    def depth(self) -> int:
        """For the step that begins."""
        if not self.first.choice:
            return 0
        second = self.second.pays if self.first.is_probing else self.second.choice
        return 2 if second else 1

    def book(self, seconds: float, demand: float) -> None:
        """The step of that depth took `seconds`; see `Trial.book`."""
        if self.first.choice and not self.first.is_probing:
            self.second.book(seconds, demand)
        self.first.book(seconds, demand)

    def restart(self) -> None:
        """The next step is of another kind."""
        self.first.restart()
        self.second.restart()
