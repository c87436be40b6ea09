"""Policies by name, as settings and traces know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import LFU, LRU, Keys, Policy
from colibri.memory.policies_duel import Duel
from colibri.memory.policies_forecast import Forecast

EVICTIONS = ("mixed", "lru", "lfu")
LFU_TOKENS = 64  # after which a use counts half as much


def make_policy(
    name: str,
    shape: tuple[int, int],
    active: int,
    rows: Sequence[Sequence[int]],
    capacities: Sequence[int],
    heat: NDArray[np.float64] | None = None,
) -> Policy:
    """A policy for a whole store.

    Args:
        name: one of `EVICTIONS`.
        shape: layers and experts `(L, E)`.
        active: experts that serve one token in one layer.
        rows: the layers that share slots, for each class of slots.
        capacities: the slots of each class.
        heat: uses `[L, E]` of earlier runs, for a start that is not blind.
    """

    def one(capacity: int) -> Policy:
        num_keys = shape[0] * shape[1]
        if name == "lru":
            return LRU(num_keys)
        if name == "lfu":
            return LFU(num_keys, LFU_TOKENS * shape[0])
        forecast = Forecast(*shape, active)
        if heat is not None:
            forecast.seed(heat)
        return Duel(forecast, LRU(num_keys), num_keys, capacity)

    if len(rows) == 1 or name == "lru":
        return one(sum(capacities))
    return EachClass(shape, rows, [one(capacity) for capacity in capacities])


class EachClass:
    """A policy of its own for each class of slots: what cannot trade places does not compete."""

    def __init__(
        self, shape: tuple[int, int], rows: Sequence[Sequence[int]], policies: Sequence[Policy]
    ) -> None:
        self._num_experts = shape[1]
        self._of = {row: p for own, p in zip(rows, policies, strict=True) for row in own}

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """Experts of one layer are used now."""
        self._each(keys, lambda policy: policy.touch(keys, missed))

    def hint(self, keys: Keys) -> None:
        """Experts of one layer are expected soon."""
        self._each(keys, lambda policy: policy.hint(keys))

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """As the policy of their class has it."""
        return self._of[int(allowed[0]) // self._num_experts].victims(n, allowed)

    def _each(self, keys: Keys, tell: Callable[[Policy], None]) -> None:
        if len(keys):
            tell(self._of[int(keys[0]) // self._num_experts])
