"""Slots become resident in the background, and stay away where they may not."""

import os
import threading

import numpy as np
import pytest

from colibri.kernels import library
from colibri.memory.arena import Arena
from colibri.memory.toucher import Toucher

pytestmark = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="the library touches"
)
SLOT, SLOTS = 3 << 20, 8


def until_touched(arena: Arena, slots: list[int]) -> None:
    """Wait for the thread; it needs milliseconds."""
    pause = threading.Event()
    while not arena.touched[slots].all():
        pause.wait(0.001)


def test_every_usable_slot_is_touched_and_keeps_its_bytes() -> None:
    arena = Arena([SLOT], [SLOTS])
    arena.data[5 * SLOT : 6 * SLOT] = 7
    arena.usable[2] = False
    arena.touch_ahead(library.load())
    until_touched(arena, [0, 1, 3, 4, 5, 6, 7])
    assert not arena.touched[2]
    assert (arena.data[5 * SLOT : 6 * SLOT] == 7).all()
    arena.close()


def test_what_is_discarded_stays_away_until_it_is_allowed() -> None:
    arena = Arena([SLOT], [SLOTS])
    arena.touch_ahead(library.load())
    until_touched(arena, list(range(SLOTS)))
    gone = np.array([6, 7])
    arena.discard(gone)
    assert arena.touched.tolist() == [True] * 6 + [False] * 2
    arena.allow(gone)
    until_touched(arena, list(range(SLOTS)))
    arena.close()


def test_nothing_is_touched_while_it_is_held() -> None:
    arena = Arena([SLOT], [SLOTS])
    arena.usable[:] = False
    arena.touch_ahead(library.load())
    assert arena._toucher is not None
    with arena._toucher.held():
        arena.usable[:] = True
        assert not arena.touched.any()
    until_touched(arena, list(range(SLOTS)))
    arena.close()


def test_closing_may_come_at_any_time_and_twice() -> None:
    for _ in range(20):
        arena = Arena([SLOT], [4 * SLOTS])
        arena.touch_ahead(library.load())
        arena.close()
        arena.close()
        assert not arena.data[:: 1 << 20].any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_close() -> None:
    arena = Arena([SLOT], [SLOTS])
    arena.touch_ahead(library.load())
    child = os.fork()
    if not child:
        arena.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    arena.close()


def test_without_a_thread_records_take_what_they_need(caplog: pytest.LogCaptureFixture) -> None:
    class Lib:
        def colibri_toucher_create(self, *_: object) -> object:
            return found.ffi.NULL

    found = library.load()
    none = np.zeros(0, np.uint8)
    toucher = Toucher(
        library.Library(found.ffi, Lib()),
        none,
        np.zeros(1, np.int64),
        none.view(bool),
        none.view(bool),
    )
    with toucher.held():
        pass
    toucher.close()
