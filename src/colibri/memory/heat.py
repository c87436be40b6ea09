"""How often each expert was used; old uses count less and less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import Keys

Counts = NDArray[np.float64]

HALF_LIFE = 4096.0  # uses an expert, on average, until a use counts half as much
_MOST_PENDING = 512
_FIRST_SHARE = 4  # one expert in so many comes before the others


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


def warm_order(
    counts: Counts, rows: Sequence[int], sizes: Sequence[int], n: int
) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Which experts to have first of layers `rows` with `sizes` experts, where `n` fit.

    The hottest quarter of them comes in file order, and so do the others. What nobody has used yet
    comes last, and only where all fit.
    Yields rows and their experts, ascending, each row at most twice.
    """
    heat = counts[list(rows)].reshape(-1)
    exists = (np.arange(counts.shape[1]) < np.array(sizes)[:, None]).reshape(-1)
    order = np.argsort(-np.where(exists, heat, -1.0), kind="stable")[: min(n, sum(sizes))]
    if n < sum(sizes):
        order = order[heat[order] > 0]
    for part in (order[: n // _FIRST_SHARE], order[n // _FIRST_SHARE :]):
        layer, expert = np.divmod(np.sort(part), counts.shape[1])
        for i in np.unique(layer).tolist():
            yield rows[i], expert[layer == i].astype(np.int32)
