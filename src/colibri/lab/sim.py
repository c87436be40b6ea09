"""Replays a trace against policies and capacities: what would have been hit, what read.

The first half warms up and teaches, the second half counts. Belady's policy knows the future and
gives up what is needed last; nobody can do better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from colibri.errors import RequestError
from colibri.lab.trace import Steps, Trace, halves, joined
from colibri.memory.directory import Directory
from colibri.memory.eviction import LFU, LRU, Keys, Ranking, Scores
from colibri.memory.policies import LFU_TOKENS
from colibri.memory.policies_duel import Duel
from colibri.memory.policies_forecast import Forecast

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
POLICIES = ("random", "lru", "lfu", "mixed", "belady")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One policy at one capacity, over the test half.

    Attributes:
        policy: its name.
        capacity: experts that fit.
        share: of all experts.
        requests: experts asked for.
        hits: those that were there.
        bytes_read: bytes of the others; 0 where the trace does not say how large an expert is.
        gap_closed: (hits - LRU's) / (Belady's - LRU's); None where there is no gap.
    """

    policy: str
    capacity: int
    share: float
    requests: int
    hits: int
    bytes_read: int
    gap_closed: float | None

    @property
    def hit_rate(self) -> float:
        """Hits / requests."""
        return self.hits / self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        num_tokens: tokens of both halves.
        num_experts: of all layers.
        steps: what was leased at once.
        scores: by policy, then capacity.
    """

    num_tokens: int
    num_experts: int
    steps: str
    scores: tuple[Score, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = asdict(self)
        for row, score in zip(found["scores"], self.scores, strict=True):
            row["hit_rate"] = score.hit_rate
        return found


class Shuffled:
    """Gives up whatever chance says."""

    def __init__(self, num_keys: int, seed: int = 0) -> None:
        self._random, self._num_keys = np.random.default_rng(seed), num_keys
        self._scores: Scores | None = None

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """New chances for all."""
        self._scores = None

    def scores(self) -> Scores:
        """Anything."""
        if self._scores is None:
            self._scores = self._random.random(self._num_keys)
        return self._scores


class Belady:
    """Gives up what is needed last, or never again (Belady, 1966)."""

    def __init__(self, num_keys: int, leases: Sequence[Keys]) -> None:
        """`leases` are all that will come, in order."""
        last = np.arange(num_keys) - (len(leases) + 1) * num_keys  # never: all different
        self._uses: list[Scores] = []
        for number in range(len(leases) - 1, -1, -1):
            keys = leases[number]
            self._uses.append(last[keys])
            last[keys] = keys - number * num_keys
        self._scores = last

    def touch(self, keys: Keys, missed: int = 0) -> None:
        """Their next use is another one now."""
        self._scores[keys] = self._uses.pop()

    def scores(self) -> Scores:
        """The last needed is lowest."""
        return self._scores


class Replay(Protocol):
    """One policy at several capacities."""

    def use(self, keys: Keys) -> list[int]:
        """How many of `keys` each capacity missed."""


class RankedReplay:
    """One policy at several capacities; they share what does not depend on the capacity."""

    def __init__(self, num_keys: int, capacities: Sequence[int], ranking: Ranking) -> None:
        self._ranking = ranking
        self._directories = [Directory(num_keys, capacity) for capacity in capacities]

    def use(self, keys: Keys) -> list[int]:
        """How many of `keys` each capacity missed."""
        self._ranking.touch(keys)
        return [directory.access(keys, self._ranking) for directory in self._directories]


class RecentReplay:
    """LRU, which needs no directory."""

    def __init__(self, num_keys: int, capacities: Sequence[int]) -> None:
        self._lru, self._capacities = LRU(num_keys), capacities

    def use(self, keys: Keys) -> list[int]:
        """How many of `keys` each capacity missed."""
        missed = self._lru.missed(keys, self._capacities)
        self._lru.touch(keys)
        return missed


class MixedReplay:
    """The default policy: a duel for each capacity."""

    def __init__(self, trace: Trace, capacities: Sequence[int]) -> None:
        self._forecast = Forecast(trace.num_layers, trace.num_experts, trace.active)
        self._lru = LRU(trace.num_keys)
        self._duels = [
            (Duel(self._forecast, self._lru, trace.num_keys, n), Directory(trace.num_keys, n))
            for n in capacities
        ]

    def use(self, keys: Keys) -> list[int]:
        """How many of `keys` each capacity missed."""
        recent = [duel.missed_by_lru(keys) for duel, _ in self._duels]
        self._forecast.touch(keys)
        self._lru.touch(keys)
        missed = []
        for (duel, directory), by_lru in zip(self._duels, recent, strict=True):
            duel.book(keys, directory.missing(keys), by_lru)
            missed.append(directory.access(keys, duel.ranking))
        return missed


def simulate(
    traces: Sequence[Trace],
    capacities: Sequence[int] | None = None,
    policies: Sequence[str] = POLICIES,
    steps: Steps = "token",
) -> Simulation:
    """Replay the first halves of `traces`, then their second halves, which count.

    Args:
        traces: of one model.
        capacities: experts that fit; by default those of `SHARES`.
        policies: names out of `POLICIES`; LRU and Belady are always among them.
        steps: what is leased at once: a token's experts, or the union of a whole pass.

    Raises:
        RequestError: no traces, traces of different models, or a capacity that is too small.
    """
    parts = [halves(trace) for trace in traces]
    whole = joined([train for train, _ in parts] + [test for _, test in parts])
    train = len(joined([train for train, _ in parts]).leases(steps))
    leases = whole.leases(steps)
    sizes = _capacities(whole, capacities, max(map(len, leases)))
    wanted = [name for name in POLICIES if name in policies or name in ("lru", "belady")]
    requests = sum(map(len, leases[train:]))
    hits = {}
    for name in wanted:
        missed = misses(name, whole, sizes, leases, skip=train)
        hits[name] = [requests - n for n in missed]
    return Simulation(
        num_tokens=len(whole.rows) // whole.num_layers,
        num_experts=whole.num_keys,
        steps=steps,
        scores=tuple(
            _score(whole, name, column, size, requests, hits)
            for name in wanted
            for column, size in enumerate(sizes)
        ),
    )


def _capacities(trace: Trace, wanted: Sequence[int] | None, least: int) -> list[int]:
    if wanted is None:
        return sorted({max(least, int(share * trace.num_keys)) for share in SHARES})
    if not wanted or min(wanted) < least:
        raise RequestError(
            f"a capacity is {min(wanted, default=0)}, but {least} experts are needed at once: give "
            "at least that many"
        )
    return sorted({min(size, trace.num_keys) for size in wanted})


def _replay(name: str, trace: Trace, sizes: Sequence[int], leases: Sequence[Keys]) -> Replay:
    rankings: dict[str, Callable[[], Ranking]] = {
        "random": lambda: Shuffled(trace.num_keys),
        "lfu": lambda: LFU(trace.num_keys, LFU_TOKENS * trace.num_layers),
        "belady": lambda: Belady(trace.num_keys, leases),
    }
    if name == "mixed":
        return MixedReplay(trace, sizes)
    if name == "lru":
        return RecentReplay(trace.num_keys, sizes)
    return RankedReplay(trace.num_keys, sizes, rankings[name]())


def misses(
    policy: str, trace: Trace, capacities: Sequence[int], leases: Sequence[Keys], skip: int = 0
) -> list[int]:
    """Misses of a policy at each capacity, all but the first `skip` of the trace's `leases`."""
    replay = _replay(policy, trace, capacities, leases)
    for keys in leases[:skip]:
        replay.use(keys)
    total = np.zeros(len(capacities), np.int64)
    for keys in leases[skip:]:
        total += replay.use(keys)
    found: list[int] = total.tolist()
    return found


def _score(
    trace: Trace, name: str, column: int, size: int, requests: int, hits: dict[str, list[int]]
) -> Score:
    gap = hits["belady"][column] - hits["lru"][column]
    own = hits[name][column]
    return Score(
        policy=name,
        capacity=size,
        share=size / trace.num_keys,
        requests=requests,
        hits=own,
        bytes_read=(requests - own) * trace.record_bytes,
        gap_closed=(own - hits["lru"][column]) / gap if gap > 0 else None,
    )
