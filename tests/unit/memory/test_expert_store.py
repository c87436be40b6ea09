"""Decisions of the store, on the null tier: no disk, no threads, no time."""

import sys
from dataclasses import asdict
from types import FrameType

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri.errors import BudgetError, ReadError
from colibri.kernels.api import EMPTY, FAILED, LOADING, READY
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.jobs import PAGE, Failure, Reason
from colibri.memory.lease import Lease
from colibri.memory.null import NullReader
from colibri.memory.read_ahead import Origin
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index

EXPERTS = 8


def null_store(counts: list[int], sizes: list[int]) -> tuple[ExpertStore, NullReader]:
    index = bare_index(sizes, EXPERTS)
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], counts)
    reader = NullReader(arena)
    return ExpertStore(index, arena, LRU(len(sizes) * EXPERTS), reader), reader


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def use(store: ExpertStore, layer: int, *experts: int) -> list[int]:
    with store.lease(layer, ids(*experts)) as slots:
        for slot in slots.tolist():
            store.table.wait(slot)
        return slots.tolist()


def test_a_lease_begins_before_its_reads_end() -> None:
    store, reader = null_store([4], [1, 1])
    with store.lease(1, ids(1, 5)) as slots:
        assert slots.dtype == np.int32
        assert list(store.table.states[slots]) == [LOADING, LOADING]
        reader.finish(int(slots[1]))
        assert list(store.table.states[slots]) == [LOADING, READY]
    with store.lease(1, ids(1, 5)) as again:
        assert np.array_equal(again, slots)
    assert (store.stats.hits, store.stats.late, store.stats.misses) == (2, 1, 2)


def test_the_least_recently_used_goes() -> None:
    store, _ = null_store([3], [1])
    first, second, third = use(store, 0, 0, 1, 2)
    use(store, 0, 0)
    assert use(store, 0, 7) == [second]
    assert use(store, 0, 6) == [third]
    assert use(store, 0, 0) == [first]
    assert store.stats.evictions == 2


def test_a_held_slot_is_never_taken() -> None:
    store, _ = null_store([3], [1])
    with store.lease(0, ids(0, 1)) as held:
        for expert in (2, 3, 4):
            assert use(store, 0, expert)[0] not in held
        with pytest.raises(BudgetError, match="2 more experts are wanted at once, and 1 of 3"):
            use(store, 0, 5, 6)
        assert use(store, 0, 0, 1) == held.tolist()
    assert use(store, 0, 5, 6, 7)


def test_a_lease_larger_than_the_arena_is_refused_and_leaves_nothing_behind() -> None:
    store, _ = null_store([3], [1])
    assert store.capacity(0) == 3
    use(store, 0, 0)
    with pytest.raises(BudgetError, match="lease fewer at a time"):
        use(store, 0, 0, 1, 2, 3)
    assert store.stats.requests == 1
    assert len(use(store, 0, 0, 1, 2)) == 3


def test_sizes_do_not_take_each_others_slots() -> None:
    store, _ = null_store([2, 3], [1, 4, 1])
    assert (store.capacity(0), store.capacity(1), store.capacity(2)) == (2, 3, 2)
    assert use(store, 0, 0, 1) == [0, 1]
    assert use(store, 1, 0, 1, 2) == [2, 3, 4]
    assert use(store, 2, 3) == [0]
    assert store.table.parts[3, 0] - store.table.parts[2, 0] == 4 * 4096


def test_reads_of_a_lease_are_in_file_order() -> None:
    index = bare_index([1], EXPERTS)
    index.offset[0] = index.offset[0][::-1].copy()
    arena = Arena([4096], [6])
    reader = NullReader(arena)
    store = ExpertStore(index, arena, LRU(EXPERTS), reader)
    with store.lease(0, ids(1, 3, 6)) as slots:
        assert list(reader.demand) == slots[::-1].tolist()


def test_a_failed_read_gives_its_slot_back() -> None:
    store, reader = null_store([2], [1])
    for attempt in range(1000):
        expert = attempt % EXPERTS
        with store.lease(0, ids(expert)) as slots:
            slot = int(slots[0])
            reader.fail(slot, Failure(Reason.IO, error=5, offset=77))
            message = str(store.failure(slot))
        assert f"byte 77: reading expert {expert} of layer 0 failed" in message
    for attempt in range(1000):
        assert store.prefetch(0, ids(attempt % EXPERTS)) == 1
        reader.fail(next(iter(reader.prefetch)), Failure(Reason.IO, error=5))
    assert sorted(use(store, 0, 2, 5)) == [0, 1]


def test_a_second_lease_tries_a_failed_read_again() -> None:
    store, reader = null_store([3], [1])
    with store.lease(0, ids(4)) as first:
        reader.fail(int(first[0]), Failure(Reason.IO, error=5))
        with store.lease(0, ids(4)) as second:
            assert second[0] != first[0]
            reader.finish(int(second[0]))
        assert store.table.states[first[0]] == FAILED
        assert "expert 4" in str(store.failure(int(first[0])))
    assert use(store, 0, 4) == second.tolist()
    assert len(set(use(store, 0, 1, 2, 3))) == 3


def test_an_error_inside_a_lease_releases_it() -> None:
    store, reader = null_store([2], [1])
    for error in (KeyboardInterrupt, ReadError):
        with pytest.raises(error), store.lease(0, ids(0, 1)):
            raise error("stop")
    assert list(reader.demand) == [0, 1]
    assert sorted(use(store, 0, 2, 3)) == [0, 1]
    assert store.stats.records == 4


def test_an_abandoned_read_is_waited_for_before_its_slot_is_used() -> None:
    store, reader = null_store([2], [1])
    with store.lease(0, ids(0, 1)):
        pass
    with store.lease(0, ids(2, 3)) as slots:
        assert list(store.table.states[slots]) == [LOADING, LOADING]
        assert sorted(reader.demand) == sorted(slots.tolist())


def test_a_demanded_prefetch_overtakes_others() -> None:
    store, reader = null_store([8], [1])
    assert store.prefetch(0, ids(0, 1, 2, 3, 4, 5), Origin.WARMED) == 6
    with store.lease(0, ids(2)) as slots:
        assert list(reader.demand) == slots.tolist()
    assert store.prefetch(0, ids(0, 1)) == 2  # they come forward
    stats = store.stats
    assert (stats.prefetched, stats.requests, stats.hits, stats.late) == (6, 1, 1, 1)


def test_a_prefetch_never_takes_a_held_slot() -> None:
    store, _ = null_store([4], [1])
    with store.lease(0, ids(0, 1, 2)) as held:
        assert store.prefetch(0, ids(5, 6)) == 0  # half of the one free slot
        assert use(store, 0, 0, 1, 2) == held.tolist()


def test_closing_ends_everything_and_may_be_repeated() -> None:
    store, _ = null_store([4], [1])
    arena = store.table.arena
    with store.lease(0, ids(0, 1)) as slots:
        store.close()
        assert list(store.table.states[slots]) == [FAILED, FAILED]
    store.close()
    assert not arena.any()
    with pytest.raises(ReadError, match="closed"):
        use(store, 0, 0)


def consistent(store: ExpertStore, reader: NullReader) -> None:
    """What must hold between any two operations, Ctrl-C or not."""
    owners = [int(slot) for slot in store._slot_of if slot >= 0]
    assert len(set(owners)) == len(owners)
    for key, slot in enumerate(store._slot_of.tolist()):
        assert slot < 0 or store._key_of[slot] == key
        assert slot < 0 or store.table.states[slot] != EMPTY
    loading = np.flatnonzero(store.table.states == LOADING).tolist()
    assert sorted([*reader.demand, *reader.prefetch, *reader.background]) == loading
    stats = store.stats
    assert stats.hits + stats.misses == stats.requests
    assert min(stats.hits, stats.misses, stats.late) >= 0
    for ahead in (stats.predicted, stats.warmed):
        assert min(*asdict(ahead).values(), ahead.waiting) >= 0


def interrupted(store: ExpertStore, at: int) -> bool:
    """Lease with a KeyboardInterrupt at the `at`-th place where CPython lets signals in."""
    places = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal places
        if "memory" in frame.f_code.co_filename and event in ("call", "c_return"):
            places += 1
            if places == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(look)
        try:
            with store.lease(0, ids(1, 2, 6)):
                pass
        finally:
            sys.setprofile(None)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_may_come_anywhere() -> None:
    at, caught = 1, True
    while caught:
        store, reader = null_store([4], [1])
        use(store, 0, 0, 1, 2, 3)
        caught = interrupted(store, at)
        assert not store._leases.any(), at
        consistent(store, reader)
        assert len(set(use(store, 0, 4, 5, 6, 7))) == 4
        consistent(store, reader)
        at += 1
    assert at > 20


class Operations(RuleBasedStateMachine):
    """Any sequence of leases, ends of reads and prefetches, against what the store promises."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.reader = null_store([4, 3], [1, 2, 1])
        self.open: list[tuple[Lease, int, list[int], list[int]]] = []
        self.requests = 0

    @rule(layer=st.integers(0, 2), experts=st.sets(st.integers(0, EXPERTS - 1), max_size=5))
    def lease(self, layer: int, experts: set[int]) -> None:
        wanted = sorted(experts)
        held = {slot for _, _, _, slots in self.open for slot in slots}
        lease = self.store.lease(layer, ids(*wanted))
        try:
            slots = lease.__enter__().tolist()
        except BudgetError:
            assert len(wanted) + len(held) > self.store.capacity(layer)  # retired slots are none
            return
        self.requests += len(wanted)
        assert len(set(slots)) == len(wanted)
        self.open.append((lease, layer, wanted, slots))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, *_ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        lease.__exit__(None, None, None)

    @rule(
        layer=st.integers(0, 2),
        experts=st.sets(st.integers(0, EXPERTS - 1), max_size=4),
        origin=st.sampled_from(Origin),
    )
    def prefetch(self, layer: int, experts: set[int], origin: Origin) -> None:
        wanted = ids(*sorted(experts))
        needed = [slot for slot in range(7) if self.is_needed(slot)]
        owners = self.store._key_of[needed].tolist()
        assert 0 <= self.store.prefetch(layer, wanted, origin) <= len(experts)
        assert self.store._key_of[needed].tolist() == owners

    def is_needed(self, slot: int) -> bool:
        """Whether this token is predicted to need what is there."""
        key, state = self.store._key_of[slot], self.store.table.states[slot]
        return bool(key >= 0 and state == READY and self.store._predictions.needed[key])

    @precondition(lambda self: any(self.reader._queues))
    @rule(data=st.data(), good=st.booleans())
    def read_ends(self, data: st.DataObject, good: bool) -> None:
        slot = data.draw(st.sampled_from([slot for queue in self.reader._queues for slot in queue]))
        if good:
            self.reader.finish(slot)
        else:
            self.reader.fail(slot, Failure(Reason.TRUNCATED))

    @rule(pages=st.integers(0, 4), back=st.booleans())
    def memory_comes_and_goes(self, pages: int, back: bool) -> None:
        if back:
            self.store.take_back(pages * PAGE)
        else:
            self.store.retire(pages * PAGE)

    @invariant()
    def holds(self) -> None:
        consistent(self.store, self.reader)
        stats = self.store.stats
        assert stats.requests == self.requests
        reads = stats.misses + stats.prefetched - stats.withdrawn
        waiting = sum(map(len, self.reader._queues))
        assert reads == stats.records + stats.failed + waiting
        for _, layer, experts, slots in self.open:
            row = self.store.table.states
            for expert, slot in zip(experts, slots, strict=True):
                assert row[slot] in (LOADING, READY, FAILED)
                assert self.store._key_of[slot] == layer * EXPERTS + expert

    def teardown(self) -> None:
        for lease, *_ in self.open:
            lease.__exit__(None, None, None)
        assert not self.store._leases.any()
        self.store.take_back(1 << 30)
        assert len(use(self.store, 0, 0, 1, 2, 3)) == 4
        assert len(use(self.store, 1, 0, 1, 2)) == 3
        self.store.close()


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
