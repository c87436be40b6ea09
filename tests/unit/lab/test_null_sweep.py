"""More memory never reads more: through the store, from the least slots to all, over 50 traces."""

import numpy as np
import pytest

from colibri.lab.null_sweep import BARS, NUM_TRACES, counted, made_up, replay, worst_ratio
from tests.unit.memory.records import bare_index

LAYERS, EXPERTS, ACTIVE, TOKENS, PAGE = 2, 16, 2, 10, 4096
SLOTS = [2, 3, 4, 6, 8, 10, 13, 16, 20, 24, 28, 32]


@pytest.mark.parametrize("eviction", BARS)
def test_more_slots_never_read_more(eviction: str) -> None:
    index = bare_index([1] * LAYERS, EXPERTS)
    for number in range(NUM_TRACES):
        trace = made_up(number, (LAYERS, EXPERTS, ACTIVE), TOKENS)
        found = [replay(index, [slots], eviction, ACTIVE, trace) for slots in SLOTS]
        assert max(worst_ratio(found)) <= BARS[eviction], number
        assert counted(eviction, trace, SLOTS, PAGE) == [each.nbytes for each in found]
        keys = np.concatenate(trace.leases())
        assert found[0].nbytes <= len(keys) * PAGE
        assert found[-1].nbytes == len(np.unique(keys)) * PAGE  # room for all
        assert all(each.seconds == each.nbytes / PAGE for each in found)


def test_layers_of_two_sizes_share_nothing() -> None:
    index = bare_index([1, 2], EXPERTS)
    for number in range(0, NUM_TRACES, 5):
        trace = made_up(number, (LAYERS, EXPERTS, ACTIVE), TOKENS)
        pairs = ([n, n + 1] for n in (2, 4, 8, 12, 15))
        found = [replay(index, slots, "lru", ACTIVE, trace) for slots in pairs]
        assert max(worst_ratio(found)) <= 1.0, number
