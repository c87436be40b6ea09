"""Recency and frequency, alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colibri.memory.eviction import LFU, LRU, Policy


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def victims(policy: Policy, n: int, allowed: list[int]) -> list[int]:
    return [allowed[i] for i in policy.victims(n, keys(*allowed))]


def test_the_oldest_goes_first() -> None:
    policy = LRU(10)
    policy.touch(keys(1, 2, 3))
    policy.touch(keys(2))
    assert victims(policy, 2, [1, 2, 3]) == [1, 3]
    assert victims(policy, 3, [3, 2, 1]) == [1, 3, 2]


def test_what_was_never_used_goes_before_everything() -> None:
    policy = LRU(10)
    policy.touch(keys(0, 5))
    assert victims(policy, 3, [5, 9, 0, 7]) == [7, 9, 0]


@given(
    touches=st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4)),
    allowed=st.permutations(range(16)),
    n=st.integers(0, 16),
)
def test_against_a_list(touches: list[set[int]], allowed: list[int], n: int) -> None:
    policy, order = LRU(16), list(range(16))
    for touched in touches:
        policy.touch(keys(*sorted(touched)))
        order = [key for key in order if key not in touched] + sorted(touched)
    assert victims(policy, n, allowed) == order[:n]


@given(
    touches=st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4), max_size=30),
    asked=st.sets(st.integers(0, 15), min_size=1),
)
def test_what_lru_would_miss(touches: list[set[int]], asked: set[int]) -> None:
    policy, order = LRU(16), list[int]()
    for touched in touches:
        policy.touch(keys(*sorted(touched)))
        order = [key for key in order if key not in touched] + sorted(touched)
    expected = [len(asked - set(order[-capacity:])) for capacity in (1, 5, 16, 20)]
    assert policy.missed(keys(*sorted(asked)), (1, 5, 16, 20)) == expected


@given(
    touches=st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4), max_size=60),
    allowed=st.permutations(range(16)),
    n=st.integers(0, 16),
)
def test_lfu_against_shrinking_counts(touches: list[set[int]], allowed: list[int], n: int) -> None:
    policy, heat = LFU(16, 3.0), [0.0] * 16
    for touched in touches:
        policy.touch(keys(*sorted(touched)))
        heat = [0.5 ** (1 / 3) * h + (key in touched) for key, h in enumerate(heat)]
    found = victims(policy, n, allowed)
    kept = [key for key in allowed if key not in found]
    assert len(set(found)) == n
    assert all(heat[a] <= heat[b] + 1e-6 for a in found for b in kept)


def test_lfu_does_not_overflow() -> None:
    policy = LFU(4, 0.01)
    for number in range(1000):
        policy.touch(keys(number % 3))
    assert victims(policy, 4, [0, 1, 2, 3]) == [3, 1, 2, 0]
    assert np.isfinite(policy.scores()).all()


def test_no_two_scores_are_equal() -> None:
    for policy in (LRU(64), LFU(64, 10.0)):
        assert len(np.unique(policy.scores())) == 64
        for _ in range(50):
            policy.touch(np.arange(3, 40))
        assert len(np.unique(policy.scores())) == 64
