"""How often each expert was used; old uses count less and less."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import Keys

Counts = NDArray[np.float64]

HALF_LIFE = 4096.0  # uses an expert, on average, until a use counts half as much
_MOST_PENDING = 512


class Heat:
    """Counts uses of `num_keys` experts; telling it of one costs next to nothing."""

    def __init__(self, num_keys: int) -> None:
        self._uses = np.zeros(num_keys, np.int64)
        self._pending: list[Keys] = []

    def touch(self, keys: Keys) -> None:
        """Experts `keys [n]` are used; the array stays as it is from now on."""
        self._pending.append(keys)
        if len(self._pending) >= _MOST_PENDING:
            self._catch_up()

    def taken(self) -> NDArray[np.int64]:
        """Uses `[num_keys]` since the last call."""
        self._catch_up()
        taken, self._uses = self._uses, np.zeros_like(self._uses)
        return taken

    def give_back(self, uses: NDArray[np.int64]) -> None:
        """Count them again: they could not be kept."""
        self._uses += uses

    def _catch_up(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._uses += np.bincount(np.concatenate(pending), minlength=len(self._uses))


def added(counts: Counts, uses: NDArray[np.integer]) -> Counts:
    """Heat `[L, E]` after further `uses [L, E]`."""
    kept = 0.5 ** (uses.sum() / (HALF_LIFE * max(1, uses.size)))
    now: Counts = counts * kept + uses
    return now


def hottest(counts: Counts, rows: tuple[int, ...], n: int) -> list[tuple[int, NDArray[np.int32]]]:
    """Row and experts, both ascending, of the `n` hottest among layers `rows`; cold ones never."""
    part = counts[list(rows)]
    order = np.argsort(-part, axis=None, kind="stable")[:n]
    order = np.sort(order[part.reshape(-1)[order] > 0])
    layer, expert = np.divmod(order, counts.shape[1])
    return [(rows[i], expert[layer == i].astype(np.int32)) for i in np.unique(layer).tolist()]
