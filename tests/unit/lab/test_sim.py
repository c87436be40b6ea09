"""Replays against plain models of each policy, and against what can be worked out by hand."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from colibri.errors import RequestError
from colibri.lab.sim import POLICIES, RankedReplay, Simulation, misses, simulate
from colibri.lab.synthetic import Routing, make_trace
from colibri.lab.trace import Trace, halves, joined
from colibri.memory.eviction import LFU, LRU, Policy
from colibri.memory.policies import LFU_TOKENS, make_policy
from colibri.memory.policies_forecast import Forecast

CAPACITIES = (8, 12, 16, 24, 32, 48)


def trace_of(*experts: tuple[int, ...], num_experts: int = 4) -> Trace:
    """One layer; each token chooses those experts."""
    n = np.arange(len(experts), dtype=np.int32)
    ids = np.array(experts, np.int32)
    return Trace(
        num_layers=1,
        num_experts=num_experts,
        record_bytes=10,
        passes=n,
        positions=n,
        tokens=n,
        rows=n * 0,
        ids=ids,
        weights=np.ones(ids.shape, np.float32),
    )


@cache
def synthetic(seed: int) -> Trace:
    """All kinds of traces: steep and flat, sticky and not, with and without changing domains."""
    random = np.random.default_rng(seed)
    return make_trace(
        Routing(
            num_tokens=160,
            zipf=random.uniform(0.3, 1.8),
            stickiness=random.uniform(0, 0.8),
            num_domains=int(random.integers(1, 5)),
            domain_tokens=random.uniform(20, 80),
            seed=seed,
        )
    )


def rates(found: Simulation, policy: str) -> list[int]:
    return [score.hits for score in found.scores if score.policy == policy]


def store_misses(policy: Policy, trace: Trace, capacity: int, skip: int) -> int:
    """What the expert store would miss: a set, and `victims` where it is full."""
    held: set[int] = set()
    missed = 0
    for number, keys in enumerate(trace.leases()):
        wanted = set(keys.tolist())
        new = wanted - held
        missed += len(new) if number >= skip else 0
        spare = len(held) + len(new) - capacity
        policy.touch(keys, len(new))
        if spare > 0:
            allowed = np.array(sorted(held - wanted), np.int64)
            held -= set(allowed[policy.victims(spare, allowed)].tolist())
        held |= wanted
    return missed


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_misses_what_the_store_would(seed: int) -> None:
    trace = synthetic(seed)
    found = simulate([trace], CAPACITIES)
    first, second = (len(half.leases()) for half in halves(trace))
    for column, capacity in enumerate(CAPACITIES):
        for name, policy in (
            ("lru", LRU(trace.num_keys)),
            ("lfu", LFU(trace.num_keys, LFU_TOKENS * trace.num_layers)),
            ("mixed", make_policy("mixed", (4, 16), 2, [range(4)], [capacity])),
        ):
            missed = store_misses(policy, trace, capacity, first)
            assert rates(found, name)[column] == 2 * second - missed, (name, capacity)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_beats_the_future(seed: int) -> None:
    found = simulate([synthetic(seed)], CAPACITIES)
    best = rates(found, "belady")
    for name in POLICIES:
        # All of the trace counts for Belady, only its second half here: hence the two.
        assert all(own <= b + 2 for own, b in zip(rates(found, name), best, strict=True)), name
    assert sum(best) > sum(rates(found, "lru")) > sum(rates(found, "random"))


def test_by_hand() -> None:
    """Three experts in turn, room for two: LRU never hits, the future hits every other time."""
    trace = trace_of(*[(n % 3,) for n in range(24)])
    found = simulate([trace], [2])
    assert rates(found, "lru") == [0]
    assert rates(found, "belady") == [6]
    scores = {score.policy: score for score in found.scores}
    assert (scores["lru"].requests, scores["lru"].bytes_read) == (12, 120)
    assert (scores["lru"].gap_closed, scores["belady"].gap_closed) == (0.0, 1.0)
    assert scores["belady"].hit_rate == 0.5
    assert found.num_tokens == 24


def test_with_room_for_all_there_is_no_gap() -> None:
    trace = trace_of(*[(n % 3,) for n in range(24)])
    found = simulate([trace], [4, 100], ["lfu"])
    assert {score.policy for score in found.scores} == {"lru", "lfu", "belady"}
    assert {(s.capacity, s.hits, s.gap_closed) for s in found.scores} == {(4, 12, None)}


def test_the_union_of_a_pass_is_leased_at_once() -> None:
    trace = joined([synthetic(0)])
    whole = replace(trace, passes=trace.passes // 8)
    union = simulate([whole], [64], ["lru"], steps="pass")
    assert union.scores[0].requests < simulate([whole], [64], ["lru"]).scores[0].requests


def test_refusals() -> None:
    trace = trace_of((0, 1), (1, 2), (2, 3), (0, 1))
    with pytest.raises(RequestError, match="a capacity is 1, but 2 experts are needed at once"):
        simulate([trace], [1])
    with pytest.raises(RequestError, match="different models"):
        simulate([trace, synthetic(0)])
    with pytest.raises(RequestError, match="no trace"):
        simulate([])


def test_traces_are_cut_one_by_one() -> None:
    """First halves of all, then second halves of all: each subject is learnt before it counts."""
    one, other = trace_of((0,), (0,), (1,), (1,)), trace_of((2,), (2,), (3,), (3,))
    found = simulate([one, other], [4])
    assert found.scores[0].requests == 4
    assert rates(found, "lru") == [2]


def test_plain_data() -> None:
    data = simulate([synthetic(0)]).as_dict()
    assert data.keys() == {"num_tokens", "num_experts", "steps", "scores"}
    assert [s["policy"] for s in data["scores"][::5]] == list(POLICIES)
    assert all(0 <= s["hit_rate"] <= 1 for s in data["scores"])


@pytest.mark.parametrize("block", range(5))
def test_more_room_never_reads_more(block: int) -> None:
    """Over 50 whole traces: exactly, where scores know no capacity; within 0.2 % for the duel."""
    sizes = [8, 9, 11, 14, 18, 23, 29, 36, 44, 53, 60, 64]
    for seed in range(block * 10, block * 10 + 10):
        trace = synthetic(seed)
        leases = trace.leases()
        for name, limit in (("lru", 1.0), ("lfu", 1.0), ("belady", 1.0), ("mixed", 1.002)):
            missed = misses(name, trace, sizes, leases)
            assert all(b <= a * limit for a, b in pairwise(missed)), (seed, name, missed)
            assert missed[-1] == len(np.unique(np.concatenate(leases)))  # room for all


@pytest.mark.parametrize("seed", range(10))
def test_more_room_never_reads_more_by_the_forecast_alone(seed: int) -> None:
    trace = synthetic(seed)
    forecasts = [RankedReplay(64, [size], Forecast(4, 16, 2)) for size in (8, 9, 12, 20, 40)]
    missed = np.sum([[f.use(keys)[0] for f in forecasts] for keys in trace.leases()], axis=0)
    assert (np.diff(missed) <= 0).all()


@pytest.mark.parametrize("block", range(4))
def test_the_default_never_falls_far_behind_lru(block: int) -> None:
    """Whatever the trace: by no more misses than it takes to notice, twice."""
    for seed in range(block * 6, block * 6 + 6):
        trace = synthetic(seed)
        leases = trace.leases()
        own, recent = (misses(name, trace, CAPACITIES, leases) for name in ("mixed", "lru"))
        for capacity, a, b in zip(CAPACITIES, own, recent, strict=True):
            assert a <= b + 2 * max(12, capacity // 4), (seed, capacity)


@pytest.mark.parametrize("stickiness", [0.2, 0.75])
def test_over_a_long_trace_the_default_is_never_below_lru(stickiness: float) -> None:
    routing = Routing(num_tokens=3000, zipf=1.1, stickiness=stickiness, seed=7)
    found = simulate([make_trace(routing)], (8, 12, 16, 32, 48), ["mixed"])
    own, recent = np.array(rates(found, "mixed")), np.array(rates(found, "lru"))
    assert (own >= recent - 0.002 * found.scores[0].requests).all()
    assert own.sum() > recent.sum()
