"""How likely each expert is to be used when its layer comes round next.

For every expert, heats with several half-lives: averages of "was it used?" over its layer's visits,
from the last few (recency) to the last few hundred (frequency). The likelihood is a weighted sum of
them. The weights fit the model at hand: they solve the least squares of what was used against what
the heats said before, over a sample of the visits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.memory.eviction import Keys, Scores, lowest

HALF_LIVES = (1.0, 4.0, 16.0, 64.0, 256.0)  # visits of a layer, that is, tokens
_FIRST_WEIGHTS = (0.1, 0.1, 0.3, 0.35, 0.15)  # fitted soon; these serve until then
_LEAST_LIKELY = 0.02
_PRIOR = 16.0  # how many squared units of heat the first weights are worth
_MEMORY = 0.998  # of the fit, at each visit that is learnt from
_LEARN_EVERY, _FIT_EVERY = 29, 4  # visits; visits that are learnt from
_TURN_POWER = 0.3
_MOST_PENDING = 64  # touches put by
_HINTED = 1e3  # above every likelihood
_EPSILON = 2.0**-40

Doubles = NDArray[np.float64]


class Forecast:
    """Gives up what is least likely to be used soon. Scores depend on uses and hints alone."""

    def __init__(self, num_layers: int, num_experts: int, active: int) -> None:
        """`active` experts of the `num_experts` of each layer serve one token."""
        self._shape = num_layers, num_experts
        self._active = active
        self._heats = np.full((num_layers, len(HALF_LIVES), num_experts), active / num_experts)
        self._planes = np.arange(len(HALF_LIVES)) * num_experts
        self._decay = 0.5 ** (1 / np.array(HALF_LIVES))[:, None]
        self._rise = 1 - self._decay[:, 0]
        self._weights = np.array(_FIRST_WEIGHTS)
        self._moments = np.eye(len(HALF_LIVES)) * _PRIOR
        self._targets = self._moments @ self._weights
        self._distinct = np.arange(num_layers * num_experts).reshape(self._shape) * _EPSILON
        self._likely: Doubles = np.empty(self._shape)
        self._stale = np.ones(num_layers, bool)  # layers whose likelihoods are to be worked out
        self._turns = _turns(num_layers)
        self._hinted = np.zeros(num_layers * num_experts, bool)
        self._num_hinted = 0
        self._pending: list[Keys] = []
        self._scores: Doubles | None = None
        self._visits = self._learnt = 0
        self._row = 0

    def seed(self, counts: Doubles) -> None:
        """Begin with the heat of earlier runs: uses `[L, E]`, of which only the shares matter."""
        uses = counts.sum(axis=1, keepdims=True)
        known = uses[:, 0] > 0
        likely = np.minimum(self._active * counts[known] / uses[known], 1.0)
        self._heats[known] = likely[:, None]
        self._stale[known] = True
        self._scores = None

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """They are used now; the arithmetic waits until somebody asks."""
        if len(keys):
            self._pending.append(keys)
            self._scores = None
        if len(self._pending) >= _MOST_PENDING:
            self._catch_up()

    def hint(self, keys: Keys) -> None:
        """They go last, until they are used or another layer has its turn after theirs."""
        self._catch_up()
        self._hinted[keys] = True
        self._scores = None
        self._num_hinted = int(np.count_nonzero(self._hinted))

    def scores(self) -> Scores:
        """The likelihood of every key, worth more the sooner its layer's turn is."""
        if self._scores is None:
            self._refresh()
            self._scores = (self._likely * self._turn()[:, None]).ravel()
            if self._num_hinted:
                self._scores[self._hinted] += _HINTED
        return self._scores

    def victims(self, n: int, allowed: Keys) -> NDArray[np.intp]:
        """The n least likely."""
        self._refresh()
        turn: Doubles = self._turn()[allowed // self._shape[1]]
        scores: Doubles = self._likely.reshape(-1)[allowed] * turn
        if self._num_hinted:
            scores[self._hinted[allowed]] += _HINTED
        return lowest(n, scores)

    def _turn(self) -> Doubles:
        """What a use in each layer's next turn `[L]` is worth: the less, the longer it takes."""
        start = len(self._turns) // 2 - 1 - self._row
        return self._turns[start : start + self._shape[0]]

    def _refresh(self) -> None:
        """Work out likelihoods where heats or weights have changed."""
        self._catch_up()
        rows = self._stale.nonzero()[0]
        if len(rows):
            self._likely[rows] = self._weighed(self._heats[rows]) + self._distinct[rows]
            self._stale[rows] = False

    def _weighed(self, heats: Doubles) -> Doubles:
        """Likelihoods `[…, E]` by `heats […, S, E]`; the bits do not depend on what is asked."""
        likely: Doubles = np.maximum((heats * self._weights[:, None]).sum(axis=-2), 0.0)
        return likely

    def _catch_up(self) -> None:
        """Bring heats up to date.

        Touches of ascending layers are worked off together. When that happens must not matter, so
        such a group ends where there is something to learn.
        """
        pending, self._pending = self._pending, []
        rows: list[int] = []
        first = 0
        num_experts = self._shape[1]
        for number, keys in enumerate(pending):
            row = keys.item(0) // num_experts
            if rows and row <= rows[-1]:
                self._visit(rows, pending[first:number])
                rows, first = [], number
            rows.append(row)
            self._visits += 1
            if self._visits % _LEARN_EVERY == 0:
                self._visit(rows[:-1], pending[first:number])
                self._learn(row, keys)
                rows, first = [row], number
        self._visit(rows, pending[first:])

    def _visit(self, rows: list[int], touched: list[Keys]) -> None:
        """Ascending `rows` had their turn and used the keys `touched`."""
        if not rows:
            return
        where: slice | list[int] = rows
        if len(rows) == rows[-1] + 1 - rows[0]:
            where = slice(rows[0], rows[-1] + 1)
        keys = touched[0] if len(rows) == 1 else np.concatenate(touched)
        self._heats[where] *= self._decay
        places = keys + keys // self._shape[1] * (self._planes[-1])
        self._heats.reshape(-1)[places[:, None] + self._planes] += self._rise
        self._stale[where] = True
        if self._num_hinted:
            self._forget_hints(rows, keys)
        self._row = rows[-1]

    def _forget_hints(self, rows: list[int], keys: Keys) -> None:
        """A large turn comes in several touches, and what is left of it is hinted until then."""
        hinted = self._hinted.reshape(self._shape)
        if rows[0] != self._row:
            hinted[self._row] = False
        hinted[rows[:-1]] = False
        self._hinted[keys] = False
        self._num_hinted = int(np.count_nonzero(self._hinted))

    def _learn(self, row: int, keys: Keys) -> None:
        """What the heats of a layer said before it used `keys`.

        Each expert counts by the inverse of its variance, about 1 / likelihood: who gives way is
        decided among the unlikely ones.
        """
        heats, experts = self._heats[row], keys % self._shape[1]
        trust = 1 / np.maximum(self._weighed(heats), _LEAST_LIKELY)
        self._moments = self._moments * _MEMORY + (heats * trust) @ heats.T
        self._targets = self._targets * _MEMORY + heats[:, experts] @ trust[experts]
        self._learnt += 1
        if self._learnt % _FIT_EVERY == 0:
            self._weights = np.linalg.solve(self._moments, self._targets)
            self._stale[:] = True


def _turns(num_layers: int) -> Doubles:
    """Worth by distance, twice over: the window that begins at L - 1 - row belongs to `row`."""
    distance = np.arange(num_layers) + 1.0  # of the layers after this one, then round to itself
    once = (distance / num_layers) ** -_TURN_POWER
    return np.concatenate([once, once])
