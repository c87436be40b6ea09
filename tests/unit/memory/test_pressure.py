"""What gives way when memory gets short: decisions under a made-up clock and memory."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import BudgetError
from colibri.kernels.api import EMPTY, LOADING
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.jobs import Failure, Reason
from colibri.memory.null import NullReader
from colibri.memory.pressure import (
    CALM_S,
    MemorySample,
    Pressure,
    Watch,
    sample_memory,
    watch_memory,
)
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index

PAGE, MIB = 4096, 1 << 20
SLOTS, EXPERTS = 64, 64


def make_store(
    sizes: tuple[int, ...] = (1, 1), counts: tuple[int, ...] = (SLOTS,), active: int = 4
) -> tuple[ExpertStore, NullReader]:
    index = bare_index(list(sizes), EXPERTS)
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], counts)
    reader = NullReader(arena)
    policy = LRU(len(sizes) * EXPERTS)
    return ExpertStore(index, arena, policy, reader, active), reader


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def use(store: ExpertStore, layer: int, *experts: int) -> list[int]:
    with store.lease(layer, ids(*experts)) as slots:
        for slot in slots.tolist():
            store.table.wait(slot)
        return slots.tolist()


@dataclass
class World:
    """Memory and time as a test wants them."""

    available: int | None = 1 << 40
    stall_s: float = 0.0
    limit_hits: int = 0
    now: float = 100.0
    looks: int = field(default=0)

    def sample(self) -> MemorySample:
        self.looks += 1
        return MemorySample(self.available, self.stall_s, self.limit_hits)

    def clock(self) -> float:
        return self.now

    def pressure(self, store: ExpertStore, floor: int = 10 * PAGE) -> Pressure:
        return Pressure(store, floor, self.sample, self.clock)

    def pass_time(self, pressure: Pressure, seconds: float) -> None:
        self.now += seconds
        pressure.poll()


def test_with_plenty_nothing_happens() -> None:
    store, _ = make_store()
    world = World()
    pressure = world.pressure(store)
    for _ in range(5):
        world.stall_s += 5
        world.pass_time(pressure, 1)
    assert store.num_usable == SLOTS
    assert world.looks == 6


def test_looks_are_rare() -> None:
    store, _ = make_store()
    world = World()
    pressure = world.pressure(store)
    for _ in range(100):
        world.pass_time(pressure, 0.01)
    assert world.looks <= 3


def test_what_is_not_there_is_never_touched() -> None:
    """Slots that nothing has landed in yet are given up before memory would run out."""
    store, _ = make_store()
    world = World(available=(10 + 40) * PAGE)
    world.pressure(store)
    assert store.num_usable == 40
    assert store.stats.evictions == 0


def test_untouched_slots_count_only_once() -> None:
    store, _ = make_store()
    world = World(available=(10 + SLOTS) * PAGE)
    pressure = world.pressure(store)
    for expert in range(SLOTS):
        use(store, 0, expert)
        assert world.available is not None
        world.available -= PAGE
        world.pass_time(pressure, 1)
    assert store.num_usable == SLOTS


def test_somebody_elses_growth_retires_the_tail(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = make_store()
    slots = use(store, 0, *range(32)) + use(store, 1, *range(32))
    assert sorted(slots) == list(range(SLOTS))
    world = World()
    pressure = world.pressure(store)
    world.available = 2 * PAGE
    with caplog.at_level(logging.WARNING):
        world.pass_time(pressure, 1)
        assert store.num_usable == SLOTS - 8
        world.pass_time(pressure, 1)
    assert store.num_usable == SLOTS - 16
    assert store.stats.evictions == 16
    assert len([r for r in caplog.records if "memory is short" in r.getMessage()]) == 1
    assert (store.table.states[SLOTS - 16 :] == EMPTY).all()
    before = store.stats.misses
    use(store, 0, *range(32))
    assert store.stats.misses == before
    with store.lease(1, ids(*range(32))) as again:
        assert again.max() < SLOTS - 16


def test_retired_memory_is_given_back() -> None:
    store, _ = make_store((512,), (8,), 1)
    store.table.arena[:] = 7
    store.retire(3 * 512 * PAGE)
    assert store.num_usable == 5
    assert not store.table.arena[5 * 512 * PAGE :].any()
    assert (store.table.arena[: 5 * 512 * PAGE] == 7).all()


@pytest.mark.parametrize("sign", ["stall_s", "limit_hits"])
def test_stalls_count_where_little_is_left(sign: str) -> None:
    store, _ = make_store()
    world = World(available=(2 * 10 + SLOTS) * PAGE)
    pressure = world.pressure(store, 30 * PAGE)
    world.pass_time(pressure, 1)
    usable = store.num_usable
    setattr(world, sign, getattr(world, sign) + 1)
    world.pass_time(pressure, 1)
    assert store.num_usable == usable - SLOTS // 16
    world.pass_time(pressure, 1)
    assert store.num_usable == usable - SLOTS // 16


def test_after_ten_calm_minutes_slots_come_back_in_steps() -> None:
    store, _ = make_store()
    use(store, 0, *range(SLOTS))
    world = World()
    pressure = world.pressure(store)
    world.available = 0
    for _ in range(3):
        world.pass_time(pressure, 1)
    assert store.num_usable == SLOTS - 30
    world.available = 1 << 40
    world.pass_time(pressure, CALM_S - 1)
    assert store.num_usable == SLOTS - 30
    counts = []
    for _ in range(12):
        world.pass_time(pressure, 2)
        counts.append(store.num_usable)
    assert counts == sorted(counts)
    assert counts[0] == SLOTS - 30 + 4
    assert counts[-1] == SLOTS
    assert use(store, 1, *range(SLOTS))


def test_nothing_comes_back_without_room_for_it() -> None:
    store, _ = make_store()
    use(store, 0, *range(SLOTS))
    world = World()
    pressure = world.pressure(store)
    world.available = 0
    world.pass_time(pressure, 1)
    world.available = 10 * PAGE
    world.pass_time(pressure, 2 * CALM_S)
    assert store.num_usable == SLOTS - 10


def test_the_active_set_always_stays() -> None:
    store, _ = make_store((1, 3), (SLOTS, SLOTS))
    world = World(available=0)
    pressure = world.pressure(store)
    for _ in range(20):
        world.pass_time(pressure, 1)
    assert [store.capacity(layer) for layer in (0, 1)] == [4, 4]
    use(store, 0, 1, 2, 3, 4)


def test_held_slots_stay_until_they_are_free() -> None:
    store, _ = make_store()
    use(store, 0, *range(SLOTS - 1))
    with store.lease(1, ids(7)) as slots:
        assert slots.tolist() == [SLOTS - 1]
        store.table.wait(SLOTS - 1)
        assert store.retire(8 * PAGE) == 0
    assert store.retire(8 * PAGE) == 8


def test_a_slot_being_read_stays() -> None:
    store, reader = make_store()
    use(store, 0, *range(SLOTS - 1))
    store.prefetch(1, ids(3))
    assert store.table.states[SLOTS - 1] == LOADING
    assert store.retire(8 * PAGE) == 0
    reader.finish(SLOTS - 1)
    assert store.retire(8 * PAGE) == 8


def test_a_lease_measured_before_still_gets_its_slots() -> None:
    store, _ = make_store()
    size = store.capacity(0)
    store.retire(SLOTS * PAGE)
    assert store.capacity(0) == 4
    assert len(use(store, 0, *range(size))) == size
    with (
        pytest.raises(BudgetError),
        store.lease(1, ids(*range(SLOTS))) as _,
        store.lease(0, ids(0)),
    ):
        pass


def test_a_system_that_does_not_tell_is_left_alone() -> None:
    store, _ = make_store()
    world = World(available=None)
    world.pass_time(world.pressure(store), 1)
    assert store.num_usable == SLOTS


def test_a_look_never_waits_for_another() -> None:
    store, _ = make_store()
    world = World()
    pressure = world.pressure(store)
    with pressure._looking:
        world.pass_time(pressure, 10)
    assert world.looks == 1


def test_the_store_asks_before_each_step() -> None:
    store, _ = make_store((1, 1, 1))
    steps: list[int] = []
    store.between_tokens = lambda: steps.append(1)
    for _ in range(4):
        for layer in range(3):
            use(store, layer, 1)
    assert len(steps) == 3


def test_the_watch_ends() -> None:
    store, _ = make_store()
    watch = watch_memory(store)
    watch.close()
    assert not watch._thread.is_alive()
    store.between_tokens()
    Watch(World().pressure(store)).close()


def test_a_thousand_failed_prefetches_cost_no_slot() -> None:
    store, reader = make_store()
    for turn in range(1000):
        store.prefetch(turn % 2, ids(turn % EXPERTS))
        for slot in list(reader.prefetch):
            reader.fail(slot, Failure(Reason.IO, 5))
    assert store.stats.failed == store.stats.prefetched == 1000
    assert store.num_usable == SLOTS
    assert sorted(use(store, 0, *range(SLOTS))) == list(range(SLOTS))


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 80), st.sets(st.integers(0, EXPERTS - 1), max_size=4)), max_size=25
    )
)
def test_any_course_of_memory_keeps_the_books(steps: list[tuple[int, set[int]]]) -> None:
    store, _ = make_store((1, 3), (SLOTS, 20))
    world = World()
    pressure = world.pressure(store)
    for pages, experts in steps:
        world.available = pages * PAGE
        world.pass_time(pressure, 300)
        chosen = sorted(experts)
        for layer in (0, 1):
            assert len(set(use(store, layer, *chosen))) == len(chosen)
        stats = store.stats
        assert stats.hits + stats.misses == stats.requests
        assert 8 <= store.num_usable <= SLOTS + 20
        taken = SLOTS * PAGE + 20 * 3 * PAGE - store.retired_bytes
        assert 0 <= store.untouched_bytes <= taken


# ---- What the system says.


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_sources_of_version_2(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write(tmp_path, "proc/pressure/memory", "some avg10=1.00 total=2000000\nfull total=1\n")
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    group = "sys/fs/cgroup/a"
    write(tmp_path, f"{group}/memory.max", "4096000\n")
    write(tmp_path, f"{group}/memory.current", "4000000\n")
    write(tmp_path, f"{group}/memory.events", "low 0\nhigh 3\nmax 4\noom 1\noom_kill 9\n")
    write(tmp_path, f"{group}/memory.pressure", "some avg10=1.00 total=5000000\nfull total=1\n")
    assert sample_memory(tmp_path) == MemorySample(96000, 5.0, 8)


def test_sources_of_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 8000 kB\n")
    write(tmp_path, "proc/self/cgroup", "4:memory:/x\n")
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.failcnt", "12\n")
    assert sample_memory(tmp_path) == MemorySample(8000 * 1024, 0.0, 12)


def test_no_sources(tmp_path: Path) -> None:
    assert sample_memory(tmp_path) == MemorySample(None, 0.0, 0)
