"""The directory against a set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colibri.memory.directory import Directory
from colibri.memory.eviction import LRU

SETS = st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4), max_size=40)


@given(accesses=SETS, capacity=st.integers(4, 16), start=st.sets(st.integers(0, 15), max_size=4))
def test_against_a_set(accesses: list[set[int]], capacity: int, start: set[int]) -> None:
    lru, held, order = LRU(16), set(start), list(range(16))
    directory = Directory(16, capacity, np.array(sorted(start), np.int64))
    for keys in accesses:
        lru.touch(np.array(sorted(keys)))
        assert directory.access(np.array(sorted(keys)), lru) == len(keys - held)
        spare = max(0, len(held | keys) - capacity)
        gone = [key for key in order if key in held - keys][:spare]
        held = (held | keys) - set(gone)
        order = [key for key in order if key not in keys] + sorted(keys)
        assert len(held) <= capacity
