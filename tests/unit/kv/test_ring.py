"""Windows in cells: which blocks are kept, where they lie, and how far a state can be cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.formats import BF16, F32, INT8_ROWS
from colibri.kernels.api import KV_BLOCK, KV_UNIT, Batch
from colibri.kernels.shared_key import WINDOW_SLACK
from colibri.kv import KVPool, KVState, Plane, Ring, StateShape, block_nbytes, cell_nbytes

SHAPES = (StateShape.keys_and_values(2, 8, window=100), StateShape.keys_and_values(2, 8))


def batch(*lengths: tuple[int, int]) -> Batch:
    """Rows from one position to another of each member."""
    rows = [np.arange(first, last, dtype=np.int32) for first, last in lengths]
    members = [np.full(len(row), i, np.int32) for i, row in enumerate(rows)]
    tables = np.zeros((len(lengths), 32), np.int32)
    cells = np.arange(len(lengths), dtype=np.int32)
    return Batch(np.concatenate(rows), np.concatenate(members), tables, cells)


@given(st.integers(1, 600), st.integers(0, 4000), st.integers(1, WINDOW_SLACK))
def test_what_a_turn_reads_and_writes_lies_in_places_of_its_own(
    window: int, start: int, rows: int
) -> None:
    kept = Plane(1, 1, window=window).num_kept
    first, last = max(0, start - window + 1), start + rows - 1
    assert last // KV_BLOCK - first // KV_BLOCK < kept
    assert Plane(1, 1, window=window).num_kept <= (window + WINDOW_SLACK) // KV_BLOCK + 2


@pytest.mark.parametrize("fmt", [F32, BF16, INT8_ROWS])
def test_blocks_of_a_window_are_in_cells_and_no_others(fmt: object) -> None:
    assert isinstance(fmt, type(F32) | type(INT8_ROWS))
    whole = SHAPES[1].block_nbytes(fmt)
    assert block_nbytes(SHAPES, fmt) == whole
    assert cell_nbytes(SHAPES, fmt) == 7 * whole  # (100 + 253) // 64 + 2
    pool = KVPool(SHAPES, 3, fmt, 2)
    windowed, full = pool.layer(0), pool.layer(1)
    assert full.ring is None
    assert windowed.ring == Ring(7, whole, 7 * whole)
    keys, values = windowed.planes
    assert (keys.block_nbytes, keys.offset, values.offset) == (KV_UNIT, 0, whole // 2)
    assert keys.pool.size == 2 * 7 * whole


def test_state_comes_before_the_blocks_of_a_cell() -> None:
    shape = StateShape((Plane(1, 4, window=8), Plane(1, 4, window=8)), cell_nbytes=100)
    pool = KVPool([shape], 1, F32, 1)
    own = pool.layer(0)
    assert own.cells is not None
    assert (own.cells.offset, own.cells.nbytes, own.planes[0].offset) == (0, 100, 128)
    assert pool.cell_nbytes == 128 + 6 * shape.layer_nbytes(F32)
    assert pool.slack == 0  # the state is that of one position


def test_tables_come_round() -> None:
    ring = Ring(3, 2 * KV_UNIT, 1024)
    found = ring.tables(np.array([0, 2], np.int32), 5)
    assert found.tolist() == [[0, 2, 4, 0, 2], [32, 34, 36, 32, 34]]
    assert found.dtype == np.int32


def test_a_step_is_taken_in_by_at_most_so_many_rows_of_a_sequence() -> None:
    ring = Ring(8, KV_UNIT, 1024)
    ((rows, together),) = ring.turns(batch((5, 6), (100, 100 + WINDOW_SLACK)))
    assert rows is None
    assert len(together.positions) == 1 + WINDOW_SLACK
    turns = list(ring.turns(batch((700, 1300), (0, 300), (9, 10))))
    assert [len(found.positions) for _, found in turns] == [513, 300, 88]
    seen = [(int(m), int(p)) for _, b in turns for m, p in zip(b.members, b.positions, strict=True)]
    assert sorted(seen) == sorted(
        [(0, p) for p in range(700, 1300)] + [(1, p) for p in range(300)] + [(2, 9)]
    )
    for member in range(3):
        own = [position for m, position in seen if m == member]
        assert own == sorted(own)


def test_a_window_is_kept_only_where_that_is_less() -> None:
    windowed = SHAPES[0]
    assert windowed.within(3 * 7 * KV_BLOCK) is windowed
    assert windowed.within(3 * 7 * KV_BLOCK - 1) == SHAPES[1]
    assert SHAPES[1].within(1) is SHAPES[1]


def opened(cells: int = 3) -> tuple[KVPool, KVState]:
    pool = KVPool(SHAPES, 64, F32, cells)
    return pool, pool.open_state()


def fill(pool: KVPool, state: KVState, value: int) -> None:
    pool.cell(state.cell)[:] = value


def test_a_state_can_be_cut_by_the_slack_and_no_further() -> None:
    pool, state = opened()
    assert state.slack == WINDOW_SLACK
    state.reserve(200)
    fill(pool, state, 1)
    assert [state.reachable(n) for n in (0, 1, 100, 300)] == [0, 1, 100, 200]
    state.reserve(1000)
    assert [state.reachable(n) for n in (743, 744, 1000)] == [0, 744, 1000]
    assert state.truncate(800) == 800
    assert state.truncate(743) == 0  # what was there is written over already
    assert state.length == 0


def test_snapshots_can_be_cut_too() -> None:
    pool, state = opened()
    state.reserve(600)
    fill(pool, state, 6)
    state.snapshot(599)
    state.reserve(2000)
    fill(pool, state, 9)
    assert [state.reachable(n) for n in (343, 344, 599, 1000)] == [0, 344, 599, 599]
    assert state.fork(400).length == 400
    assert state.truncate(1500) == 599
    assert set(pool.cell(state.cell).tolist()) == {6}
    state.reserve(700)
    assert [state.reachable(n) for n in (343, 443, 444)] == [0, 443, 444]


def test_a_snapshot_of_what_is_gone_is_not_taken() -> None:
    pool, state = opened()
    state.reserve(1000)
    state.snapshot(700)
    assert pool.num_free_cells == 2
    assert state.reachable(700) == 0


def test_what_others_wrote_stands_for_its_own_length() -> None:
    _, state = opened()
    state.reserve(100)
    state.seal()
    assert (state.reachable(99), state.reachable(100)) == (0, 100)


def test_forgetting_a_snapshot_gives_its_cell_back() -> None:
    pool, state = opened()
    state.reserve(1000)
    state.snapshot()
    state.snapshot(900)
    assert pool.num_free_cells == 0
    assert state.forget_snapshot()
    assert (pool.num_free_cells, len(state.cells())) == (1, 2)
    assert state.forget_snapshot()
    assert not state.forget_snapshot()
