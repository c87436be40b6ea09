"""In which order a sparse layer reads and computes, on the null tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colibri.errors import ReadError
from colibri.formats import F32
from colibri.kernels.api import Batch, Experts, Ints, Matrix, Norm, Router, Routing, SlotFailed
from colibri.kernels.reference import ReferenceKernels
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.jobs import Failure, Jobs, Reason
from colibri.memory.null import NullReader
from colibri.memory.slot_classes import slot_classes
from colibri.nn.moe import BoundMoE
from colibri.nn.sublayer import Step
from tests.unit.memory.records import bare_index

EXPERTS, WIDTH = 16, 4
Event = tuple[str, list[int]]


class Recorder(NullReader):
    """Notes what is asked for."""

    def __init__(self, arena: Arena, events: list[Event]) -> None:
        super().__init__(arena)
        self._events = events

    def submit(self, jobs: Jobs) -> None:
        self._events.append(("read", sorted((jobs.records % EXPERTS).tolist())))
        super().submit(jobs)


class Kernels(ReferenceKernels):
    """Notes what is computed; the arithmetic is left out."""

    def __init__(self, events: list[Event], chosen: Ints) -> None:
        super().__init__()
        self._events, self._chosen = events, chosen

    def route_step(self, layer: Router, x: Any, given: Ints | None = None) -> Routing:
        ids = self._chosen.reshape(len(x), -1)
        return Routing(x, ids, np.ones(ids.shape, np.float32), np.unique(ids))

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Any, y: Any
    ) -> None:
        self._events.append(("compute", experts.tolist()))
        for slot in slots.tolist():
            table.wait(slot)
            if table.states[slot] != 2:
                raise SlotFailed(slot)

    def moe_finish(self, layer: Experts, routing: Routing, y: Any, x: Any) -> None:
        self._events.append(("finish", []))


class Layer:
    """A layer whose routing is given, with `slots` for it."""

    def __init__(self, slots: int, chosen: list[int], rows: int = 1) -> None:
        self.events: list[Event] = []
        index = bare_index([1], EXPERTS)
        arena = Arena([found.slot_nbytes for found in slot_classes(index)], [slots])
        self.reader = Recorder(arena, self.events)
        self.store = ExpertStore(index, arena, LRU(EXPERTS), self.reader)
        self._kernels = Kernels(self.events, np.array(chosen, np.int32))
        self._x = np.zeros((rows, WIDTH), np.float32)
        gate = Matrix(F32, EXPERTS, WIDTH, np.zeros(EXPERTS * WIDTH * 4, np.uint8))
        part: Any = None
        self._moe = BoundMoE(
            0,
            Router(Norm(np.ones(WIDTH, np.float32), 1e-6), gate, 1, False),
            Experts(EXPERTS, part, part, part),
        )

    def step(self) -> list[Event]:
        """What a step did, in order."""
        self.events.clear()
        rows = np.zeros(len(self._x), np.int32)
        batch = Batch(rows, rows, np.zeros((1, 1), np.int32))

        def look(layer: int, used: Ints) -> None:
            self.events.append(("look", used.tolist()))

        step = Step(self._kernels, self.store, batch, rows, None, look)
        self._moe.step(step, self._x, self._x)
        return list(self.events)


def test_the_next_group_is_being_read_while_one_is_computed() -> None:
    layer = Layer(6, list(range(11)), 11)
    assert layer.step() == [
        ("read", [0, 1, 2]),
        ("read", [3, 4, 5]),
        ("compute", [0, 1, 2]),
        ("read", [6, 7, 8]),
        ("compute", [3, 4, 5]),
        ("read", [9, 10]),
        ("compute", [6, 7, 8]),
        ("compute", [9, 10]),
        ("finish", []),
    ]


@pytest.mark.parametrize("slots", range(1, 14))
def test_a_record_is_read_once_and_in_time(slots: int) -> None:
    chosen = [1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15]
    layer = Layer(slots, chosen, len(chosen))
    events = layer.step()
    for kind in ("read", "compute"):
        assert [e for name, group in events if name == kind for e in group] == chosen
    stats = layer.store.stats
    assert (stats.misses, stats.requests) == (len(chosen), len(chosen))
    assert layer.store.stats.bytes_read == len(chosen) * 4096
    assert not layer.store._leases.any()


def test_what_is_there_is_not_read_again() -> None:
    layer = Layer(16, [4, 5, 6], 3)
    layer.step()
    assert layer.step() == [("look", [4, 5, 6]), ("compute", [4, 5, 6]), ("finish", [])]


def test_it_looks_ahead_when_its_own_reads_are_under_way() -> None:
    assert Layer(4, [3, 2]).step() == [
        ("read", [2, 3]),
        ("look", [2, 3]),
        ("compute", [2, 3]),
        ("finish", []),
    ]


def test_a_failed_group_ends_the_step_and_holds_nothing() -> None:
    layer = Layer(4, list(range(8)), 8)
    wait, told = layer.reader.wait, []

    def fail_the_sixth(slot: int) -> None:
        if layer.store._key_of[slot] == 5:
            told.append(slot)
            layer.reader.fail(slot, Failure(Reason.IO, 5, offset=77))
        else:
            wait(slot)

    layer.reader.wait = fail_the_sixth  # type: ignore[method-assign]
    with pytest.raises(ReadError, match="expert 5 of layer 0"):
        layer.step()
    assert len(told) == 1
    assert not layer.store._leases.any()
    assert ("compute", [6, 7]) not in layer.events
    layer.reader.wait = wait  # type: ignore[method-assign]
    assert layer.step()[-1] == ("finish", [])
