"""The default policy: as good as the better of its two rankings, within a stated loss."""

import numpy as np
import pytest

from colibri.memory.directory import Directory
from colibri.memory.eviction import LRU, Keys
from colibri.memory.policies_duel import Duel
from colibri.memory.policies_forecast import Forecast


def duel(num_keys: int, capacity: int, active: int = 2) -> Duel:
    return Duel(Forecast(1, num_keys, active), LRU(num_keys), num_keys, capacity)


def play(policy: Duel, uses: list[Keys], num_keys: int, capacity: int) -> tuple[int, int]:
    """Misses of the policy, and of LRU."""
    directory, lru = Directory(num_keys, capacity), LRU(num_keys)
    own = recent = 0
    for keys in uses:
        recent += lru.missed(keys, [capacity])[0]
        lru.touch(keys)
        by_lru = policy.missed_by_lru(keys)
        policy._forecast.touch(keys)
        policy._lru.touch(keys)
        policy.book(keys, directory.missing(keys), by_lru)
        own += directory.access(keys, policy.ranking)
    return own, recent


def blinded(policy: Duel) -> None:
    """Make the forecast prefer what is never used."""
    likely = np.linspace(1, 0, policy._num_keys)[None]
    policy._forecast._visit = lambda rows, touched: None  # type: ignore[method-assign]
    policy._forecast._learn = lambda row, keys: None  # type: ignore[method-assign]
    policy._forecast._weighed = lambda heats: likely[: len(heats)]  # type: ignore[method-assign]


def windows(num_keys: int, num: int, size: int = 6, seed: int = 0) -> list[Keys]:
    """A window of experts that moves on, at the far end of the keys: LRU's own pattern."""
    random = np.random.default_rng(seed)
    return [
        np.sort(random.choice(size, 2, replace=False)) + num_keys // 2 + (n // 40 * size) % 24
        for n in range(num)
    ]


def test_a_bad_forecast_costs_no_more_than_the_limit() -> None:
    num_keys, capacity = 64, 12
    policy = duel(num_keys, capacity)
    blinded(policy)
    own, recent = play(policy, windows(num_keys, 3000), num_keys, capacity)
    assert policy.fallen_back
    change_over = capacity
    assert own <= recent + policy._limit + change_over + 2


def test_it_stays_where_the_forecast_is_better() -> None:
    random = np.random.default_rng(1)
    chance = 1 / np.arange(1, 65) ** 1.2
    chance /= chance.sum()
    uses = [np.sort(random.choice(64, 2, replace=False, p=chance)) for _ in range(3000)]
    policy = duel(64, 12)
    own, recent = play(policy, uses, 64, 12)
    assert not policy.fallen_back
    assert own < 0.95 * recent


def test_it_comes_back_when_the_forecast_has_got_better() -> None:
    num_keys, capacity = 64, 12
    policy = duel(num_keys, capacity)
    blinded(policy)
    play(policy, windows(num_keys, 300), num_keys, capacity)
    assert policy.fallen_back
    # Now what the forecast prefers is used in turn, in a circle that is too large for LRU.
    circle = [np.array([n % 16]) for n in range(600)]
    play(policy, circle, num_keys, capacity)
    assert not policy.fallen_back


def test_victims_are_those_of_the_one_that_decides() -> None:
    policy = duel(8, 4)
    for key in (3, 2, 1, 0):
        policy.touch(np.array([key]), 1)
    allowed = np.arange(4)
    assert policy.victims(2, allowed).tolist() == policy._forecast.victims(2, allowed).tolist()
    policy.fallen_back = True
    assert allowed[policy.victims(2, allowed)].tolist() == [3, 2]


def test_hints_reach_the_forecast() -> None:
    policy = duel(8, 4)
    policy.touch(np.array([1, 2]))
    policy.hint(np.array([7]))
    assert 7 not in policy.victims(7, np.arange(8))


@pytest.mark.parametrize("capacity", [8, 9])
def test_with_room_for_all_there_is_nothing_to_compare(capacity: int) -> None:
    policy = duel(8, capacity)
    for n in range(200):
        policy.touch(np.array([n % 8]), 1)
    assert not policy.fallen_back
