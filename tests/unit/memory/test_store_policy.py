"""What the store tells its policy, and what warms it."""

import numpy as np

from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU, Keys
from colibri.memory.expert_store import ExpertStore
from colibri.memory.null import NullReader
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index

EXPERTS = 8


class Listening(LRU):
    """LRU that remembers what it was told."""

    def __init__(self, num_keys: int) -> None:
        super().__init__(num_keys)
        self.told: list[tuple[list[int], int]] = []
        self.hints: list[int] = []

    def touch(self, keys: Keys, missed: int = 0) -> None:
        super().touch(keys, missed)
        self.told.append((keys.tolist(), missed))

    def hint(self, keys: Keys) -> None:
        self.hints += keys.tolist()

    def victims(self, n: int, allowed: Keys) -> np.ndarray:
        self.told.append((["victims"], n))  # type: ignore[list-item]
        return super().victims(n, allowed)


def made(counts: list[int], sizes: list[int]) -> tuple[ExpertStore, NullReader, Listening]:
    index = bare_index(sizes, EXPERTS)
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], counts)
    reader, policy = NullReader(arena), Listening(len(sizes) * EXPERTS)
    return ExpertStore(index, arena, policy, reader), reader, policy


def use(store: ExpertStore, layer: int, *experts: int) -> None:
    with store.lease(layer, np.array(experts, np.int32)) as slots:
        for slot in slots.tolist():
            store.table.wait(slot)


def test_a_use_is_told_before_room_is_made() -> None:
    store, _, policy = made([3], [1])
    use(store, 0, 0, 1)
    use(store, 0, 1, 2)
    use(store, 0, 2, 5)
    assert policy.told == [([0, 1], 2), ([1, 2], 1), ([2, 5], 1), (["victims"], 1)]


def test_what_was_read_ahead_counts_as_missed_once() -> None:
    store, _, policy = made([8], [1])
    assert store.prefetch(0, np.array([3, 4], np.int32)) == 2
    use(store, 0, 2, 3)
    use(store, 0, 2, 3)
    assert policy.told == [([2, 3], 2), ([2, 3], 0)]
    assert (store.stats.hits, store.stats.misses) == (3, 1)


def test_expectations_reach_the_policy() -> None:
    store, _, policy = made([8], [1, 1])
    store.expect(1, np.array([2, 6], np.int32))
    assert policy.hints == [EXPERTS + 2, EXPERTS + 6]


def test_uses_are_counted() -> None:
    store, _, _ = made([8], [1, 1])
    use(store, 1, 2, 3)
    use(store, 1, 3)
    expected = np.zeros(2 * EXPERTS, int)
    expected[[EXPERTS + 2, EXPERTS + 3]] = [1, 2]
    assert np.array_equal(store.heat.taken(), expected)


def test_the_hottest_are_read_in_file_order_behind_demand() -> None:
    store, reader, _ = made([6], [1, 1])
    counts = np.zeros((2, EXPERTS))
    counts[0, [7, 2]] = 5, 4
    counts[1, [0, 6, 3]] = 9, 8, 1
    assert store.warm(counts) == 5
    with store.lease(0, np.array([5], np.int32)) as slots:
        assert list(reader.demand) == slots.tolist()
    assert [int(store._key_of[slot]) for slot in reader.background] == [8, 2, 7, 11, 14]
    use(store, 1, 0, 6)
    assert (store.stats.prefetched, store.stats.hits) == (5, 2)


def test_cold_experts_are_not_read() -> None:
    store, reader, _ = made([4, 3], [1, 2])
    assert store.warm(np.zeros((2, EXPERTS))) == 0
    assert not reader.background


def test_where_all_fit_all_are_read() -> None:
    store, reader, _ = made([2 * EXPERTS], [1, 1])
    assert store.warm(np.zeros((2, EXPERTS))) == 2 * EXPERTS
    assert [int(store._key_of[slot]) for slot in reader.background] == list(range(2 * EXPERTS))
    with store.lease(1, np.array([3, 5], np.int32)) as slots:
        assert list(reader.demand) == slots.tolist()
    assert store.stats.misses == 0


def test_what_waits_in_the_background_makes_room_before_anything_else() -> None:
    store, reader, _ = made([4], [1, 1])
    counts = np.zeros((2, EXPERTS))
    counts[0, :4] = 4, 3, 2, 1
    store.warm(counts)
    use(store, 0, 5, 6)
    assert (store.stats.withdrawn, store.stats.evictions) == (2, 0)
    assert store.stats.warmed.withdrawn == 2 * 4096
    assert store.prefetch(1, np.array([0], np.int32)) == 1  # half of all
    while reader.background:
        reader.finish(next(iter(reader.background)))
    use(store, 0, 5, 6)
    assert store.stats.misses == 2


def test_a_prediction_brings_what_waits_in_the_background_forward() -> None:
    store, reader, _ = made([2 * EXPERTS], [1, 1])
    store.warm(np.zeros((2, EXPERTS)))
    assert store.prefetch(1, np.array([6, 2], np.int32)) == 2
    assert sorted(int(store._key_of[slot]) for slot in reader.prefetch) == [
        EXPERTS + 2,
        EXPERTS + 6,
    ]
    use(store, 1, 2)
    assert store.stats.withdrawn == 0  # what was wrongly predicted is read some time all the same


def test_under_pressure_nothing_more_is_warmed() -> None:
    store, reader, _ = made([2 * EXPERTS], [1, 1])
    store.warm(np.zeros((2, EXPERTS)))
    assert store.untouched_bytes == store.slots_bytes  # none of it has landed
    reader.finish(next(iter(reader.background)))
    assert store.retire(4 * 4096) == 4
    assert not reader.background
    assert store.untouched_bytes == (2 * EXPERTS - 5) * 4096
    use(store, 1, EXPERTS - 1)
    assert store.stats.misses == 1
