import numpy as np
import pytest

from colibri.memory.eviction import LFU, LRU
from colibri.memory.policies import EVICTIONS, make_policy
from colibri.memory.policies_duel import Duel

SHAPE = (4, 8)


@pytest.mark.parametrize(("name", "kind"), [("mixed", Duel), ("lru", LRU), ("lfu", LFU)])
def test_by_name(name: str, kind: type) -> None:
    assert name in EVICTIONS
    assert isinstance(make_policy(name, SHAPE, 2, [range(4)], [12]), kind)


@pytest.mark.parametrize("name", EVICTIONS)
def test_classes_of_slots_do_not_compete(name: str) -> None:
    policy = make_policy(name, SHAPE, 2, [(0, 2), (1, 3)], [6, 8])
    for _ in range(3):
        for layer in range(4):
            policy.touch(np.array([1, 2]) + 8 * layer, 0)
    policy.hint(np.array([8 + 5]))
    allowed = np.array([8 + 1, 8 + 4, 24 + 2, 24 + 6])
    assert set(allowed[policy.victims(2, allowed)].tolist()) == {8 + 4, 24 + 6}
    policy.touch(np.empty(0, np.int64))


def test_heat_seeds_the_forecast() -> None:
    heat = np.zeros(SHAPE)
    heat[:, 5] = 9.0
    policy = make_policy("mixed", SHAPE, 2, [range(4)], [12], heat)
    assert set(policy.victims(7, np.arange(8)).tolist()) == {0, 1, 2, 3, 4, 6, 7}
