"""What the layers ahead are predicted to want within this token, and what is read for that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import Keys, Policy


class Predictions:
    """Each holds until its layer's turn, or until a new token begins.

    Attributes:
        needed: `[num_keys]` whether an expert is predicted to be needed.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.needed: NDArray[np.bool_] = np.zeros(num_layers * num_experts, bool)
        self._num_experts = num_experts
        self._slots: dict[int, list[int]] = {}  # read into, by row of the layer

    def add(self, row: int, keys: Keys) -> None:
        """A layer is predicted to want `keys [n]`."""
        self._slots.setdefault(row, [])
        self.needed[keys] = True

    def read(self, row: int, slots: list[int]) -> None:
        """For that, records are read into `slots`."""
        self._slots[row] += slots

    def count(self, keys: Keys) -> int:
        """How many of `keys` are needed."""
        return int(np.count_nonzero(self.needed[keys])) if self._slots else 0

    def victims(self, n: int, keys: Keys, policy: Policy) -> NDArray[np.intp]:
        """Which n of `keys [m]` make room by the policy; what is needed goes last."""
        if not self._slots:
            return policy.victims(n, keys)
        needed = self.needed[keys]
        loose = (~needed).nonzero()[0]
        if n <= len(loose):
            return loose[policy.victims(n, keys[loose])]
        spared = needed.nonzero()[0]
        others = spared[policy.victims(n - len(loose), keys[spared])]
        return np.concatenate([loose, others])

    def end(self, row: int, last_row: int) -> list[tuple[int, list[int]]]:
        """The turn of `row` has come, after that of `last_row`: rows and slots of what has ended.

        With a new token, so have the predictions that a step which was cut short left behind.
        """
        if not self._slots:
            return []
        is_new = row <= last_row
        ended = [each for each in self._slots if is_new or each <= row]
        for each in ended:
            self.needed[each * self._num_experts : (each + 1) * self._num_experts] = False
        return [(each, self._slots.pop(each)) for each in ended]
