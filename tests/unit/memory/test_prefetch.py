"""What the store does with predictions, and what the prefetcher predicts when."""

from dataclasses import replace

import numpy as np
import pytest

from colibri.kernels.api import READY, Ints
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.governor import Governor, Trial
from colibri.memory.jobs import Failure, Reason
from colibri.memory.null import NullReader
from colibri.memory.prefetch import Prefetcher, PrefetchMode
from colibri.memory.read_ahead import Origin
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index
from tests.unit.memory.test_expert_store import ids, use
from tests.unit.memory.virtual import Decoding

EXPERTS, PAGE = 8, 4096
MODES: tuple[PrefetchMode, ...] = ("off", "on")


def made(slots: int = 8, layers: int = 4) -> tuple[ExpertStore, NullReader]:
    index = bare_index([1] * layers, EXPERTS)
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], [slots])
    reader = NullReader(arena)
    return ExpertStore(index, arena, LRU(layers * EXPERTS), reader), reader


def land(reader: NullReader) -> None:
    for slot in [*reader.demand, *reader.prefetch]:
        reader.finish(slot)


def test_what_is_predicted_is_read_in_the_order_given() -> None:
    store, reader = made()
    assert store.prefetch(2, ids(7, 1, 4)) == 3
    keys = [int(store._key_of[slot]) for slot in reader.prefetch]
    assert keys == [2 * EXPERTS + expert for expert in (7, 1, 4)]


def test_what_this_token_needs_is_never_taken() -> None:
    store, reader = made(slots=4)
    use(store, 1, 0, 1, 2, 3)
    assert store.prefetch(1, ids(0, 1, 2)) == 0  # all there
    assert store.prefetch(2, ids(5, 6)) == 0  # half of the one other slot
    with store.lease(1, ids(0, 1, 2, 3)):
        land(reader)
    assert store.stats.evictions == 0


def test_a_demand_takes_what_is_needed_last() -> None:
    store, _ = made(slots=4)
    use(store, 2, 0, 1)
    use(store, 0, 0, 1)
    store.prefetch(2, ids(0, 1))
    use(store, 1, 2, 3)  # the least recently used are needed: others make room
    use(store, 2, 0, 1)
    assert store.stats.misses == 6
    use(store, 0, 4)
    store.prefetch(2, ids(0, 1))
    assert len(use(store, 1, 0, 1, 2, 3)) == 4  # no others are left
    assert store.stats.misses == 10


def test_reads_in_vain_are_called_off_when_the_layer_has_its_turn() -> None:
    store, reader = made(slots=8)
    assert store.prefetch(1, ids(0, 1, 2, 3)) == 4
    reader.finish(next(iter(reader.prefetch)))
    with store.lease(1, ids(1, 7)) as slots:
        assert list(reader.demand) == slots.tolist()
        assert not reader.prefetch
    stats = store.stats
    assert (stats.prefetched, stats.withdrawn, stats.late, stats.misses) == (4, 2, 1, 1)
    ahead = stats.predicted
    assert (ahead.read, ahead.withdrawn, ahead.late) == (4 * PAGE, 2 * PAGE, PAGE)
    assert ahead.waiting == PAGE  # expert 0 is there, and nobody wanted it
    use(store, 0, *range(8))
    assert store.stats.predicted.wasted == PAGE
    assert store.stats.evictions == 2 + 1


def test_predictions_of_a_step_that_ended_early_are_forgotten() -> None:
    store, reader = made(slots=8)
    use(store, 0, 0)
    store.prefetch(2, ids(3))
    use(store, 0, 0)
    assert not reader.prefetch
    assert not store._predictions.needed.any()
    assert store.stats.predicted.withdrawn == PAGE


def test_the_ledger_knows_what_became_of_every_byte() -> None:
    store, reader = made(slots=8)
    store.prefetch(1, ids(0, 1, 2))
    first, second, third = list(reader.prefetch)
    reader.finish(first)
    reader.fail(second, Failure(Reason.IO, 5))
    use(store, 1, 0, 1, 2)
    ahead = store.stats.predicted
    assert (ahead.read, ahead.useful, ahead.late) == (3 * PAGE, PAGE, PAGE)
    assert store.table.states[third] == READY
    use(store, 0, *range(8))
    ahead = store.stats.predicted
    assert (ahead.failed, ahead.wasted, ahead.waiting) == (PAGE, 0, 0)


def test_warm_reads_are_not_called_off() -> None:
    store, reader = made(slots=8)
    store.prefetch(1, ids(0, 1), Origin.WARMED)
    use(store, 1, 5)
    assert len(reader.background) == 2
    assert store.stats.warmed.waiting == 2 * PAGE
    assert store.stats.predicted.read == 0


class Asked:
    """A predictor that remembers what it was asked."""

    def __init__(self, *experts: int) -> None:
        self.layers: list[int] = []
        self._experts = ids(*experts)

    def __call__(self, layer: int) -> Ints:
        self.layers.append(layer)
        return self._experts


def step(store: ExpertStore, ahead: Prefetcher, asked: Asked, *used: int, rows: int = 1) -> bool:
    looks = ahead.begin(rows)
    for layer in range(4):
        with store.lease(layer, ids(*used)) as slots:
            if looks:
                ahead.look(layer, ids(*used), asked)
            for slot in slots.tolist():
                store.table.wait(slot)
    if looks:
        ahead.end()
    return looks


@pytest.mark.parametrize(
    ("mode", "governor", "layers"),
    [
        ("off", Governor(Trial(True, 0.2)), []),
        ("auto", Governor(), []),
        ("on", Governor(), [1, 2, 3]),
        ("auto", Governor(Trial(True, 0.2)), [1, 2, 3]),
    ],
)
def test_how_far_it_looks(mode: PrefetchMode, governor: Governor, layers: list[int]) -> None:
    store, _ = made()
    ahead, asked = Prefetcher(store, range(4), mode, governor, lambda: 0.0), Asked(1, 2)
    step(store, ahead, asked, 1, 3)
    assert asked.layers == layers


def test_it_looks_two_ahead_where_the_next_layer_needs_no_read() -> None:
    store, reader = made(slots=12)
    use(store, 1, 1, 2)
    governor = Governor(Trial(True, 0.2), Trial(True, 0.2))
    ahead = Prefetcher(store, range(4), "auto", governor, lambda: 0.0)
    asked = Asked(1, 2)
    assert ahead.begin(1)
    with store.lease(0, ids(1)):
        ahead.look(0, ids(1), asked)
    assert asked.layers == [1, 2]
    assert [int(store._key_of[slot]) for slot in reader.prefetch] == [
        2 * EXPERTS + e for e in (1, 2)
    ]
    with store.lease(1, ids(1)):
        ahead.look(1, ids(1), asked)
    assert asked.layers == [1, 2, 2, 3]


def test_large_steps_cost_nothing() -> None:
    store, _ = made()
    ahead, asked = Prefetcher(store, range(4), "on"), Asked(1)
    assert not step(store, ahead, asked, 1, rows=512)
    assert not asked.layers


def test_a_model_that_fits_is_looked_ahead_until_it_is_there() -> None:
    store, reader = made(slots=32)
    store.warm(np.zeros((4, EXPERTS)))
    ahead, asked = Prefetcher(store, range(4), "on"), Asked(1)
    for _ in range(12):
        step(store, ahead, asked, 1)
    assert 0 < len(asked.layers) < 3 * 12
    assert len(reader.background) == 32 - 4


def test_without_reads_it_soon_stops_asking() -> None:
    store, _ = made(slots=8)
    ahead, asked = Prefetcher(store, range(4), "on"), Asked(1)
    for _ in range(30):
        step(store, ahead, asked, 1)
    assert 0 < len(asked.layers) <= 30
    before = len(asked.layers)
    step(store, ahead, asked, 1)
    assert len(asked.layers) == before
    use(store, 3, 7)
    assert step(store, ahead, asked, 1)


def test_recall_is_measured_for_each_distance() -> None:
    store, _ = made()
    governor = Governor(Trial(True, 0.2), Trial(True, 0.2))
    ahead = Prefetcher(store, range(4), "auto", governor, lambda: 0.0)
    use(store, 1, 1, 2)
    step(store, ahead, Asked(1, 2), 1, 3)
    stats = ahead.stats
    assert (stats.recall, stats.recall_by_two) == (0.5, 0.5)
    assert (stats.steps, stats.predictions, stats.wanted, stats.foreseen) == (1, 5, 10, 5)
    assert (stats.wanted_by_two, stats.foreseen_by_two) == (4, 2)


def test_a_thousand_failed_predictions_cost_no_slot() -> None:
    store, reader = made(slots=4)
    ahead = Prefetcher(store, range(4), "on", clock=lambda: 0.0)
    for turn in range(1000):
        ahead.begin(1)
        with store.lease(0, ids(turn % EXPERTS)) as slots:
            ahead.look(0, ids(turn % EXPERTS), Asked((turn + 1) % EXPERTS))
            for slot in list(reader.prefetch):
                reader.fail(slot, Failure(Reason.IO, 5))
            store.table.wait(int(slots[0]))
        ahead.end()
    assert store.stats.failed == store.stats.prefetched == 1000
    assert sorted(use(store, 0, 0, 1, 2, 3)) == [0, 1, 2, 3]
    ahead_bytes = store.stats.predicted
    assert ahead_bytes.failed == ahead_bytes.read == 1000 * PAGE


@pytest.mark.parametrize(("recall", "least"), [(0.72, 1.08), (0.90, 1.21)])
def test_lookahead_hides_reads_where_they_take_as_long_as_computing(
    recall: float, least: float
) -> None:
    model = Decoding(experts=64, active=8, expert_s=0.2, attention_s=1.6, sticky=0.7, recall=recall)
    tokens, warm = 44, 16
    times, _, store = replace(model, record_s=1e-9).decode("off", tokens)
    record_s = sum(times) / store.stats.misses
    off, on = (
        sum(replace(model, record_s=record_s).decode(mode, tokens)[0][warm:]) for mode in MODES
    )
    assert off / on >= least


def test_nothing_is_asked_where_no_layer_follows() -> None:
    store, _ = made()
    ahead, asked = Prefetcher(store, range(4), "on"), Asked(1)
    assert ahead.begin(1)
    ahead.look(3, np.array([1], np.int32), asked)
    assert not asked.layers
