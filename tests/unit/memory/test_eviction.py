"""The policy, alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colibri.memory.eviction import LRU


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def victims(policy: LRU, n: int, allowed: list[int]) -> list[int]:
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
