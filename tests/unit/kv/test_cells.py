"""Recurrent state: cells, snapshots, and where a sequence can go back to."""

import numpy as np
import pytest

from colibri.errors import BudgetError
from colibri.formats import BF16, F32, INT8_ROWS, padded
from colibri.kv import KVPool, KVState, Plane, StateShape, Window, block_nbytes, cell_nbytes

SHAPES = (StateShape((Plane(1, 8),), cell_nbytes=100), StateShape(), StateShape(cell_nbytes=4))


def pool(num_cells: int = 3) -> KVPool:
    return KVPool(SHAPES, 8, F32, num_cells)


def fill(of: KVPool, state: KVState, value: int) -> None:
    """As a layer would write its state."""
    layer = of.layer(0).cells
    assert layer is not None
    start = state.cell * layer.cell_nbytes + layer.offset
    layer.pool[start : start + layer.nbytes] = value


def held(of: KVPool, state: KVState) -> int:
    """What `fill` wrote last."""
    layer = of.layer(0).cells
    assert layer is not None
    start = state.cell * layer.cell_nbytes + layer.offset
    (value,) = set(layer.pool[start : start + layer.nbytes].tolist())
    return int(value)


def test_layers_have_their_own_part_of_a_cell() -> None:
    assert cell_nbytes(SHAPES, F32) == 128 + 64
    first, none, last = (pool().layer(i).cells for i in range(3))
    assert first is not None
    assert last is not None
    assert none is None
    assert (first.offset, first.nbytes, last.offset, last.nbytes) == (0, 100, 128, 4)
    assert first.cell_nbytes == last.cell_nbytes == 192
    assert first.pool.size == 3 * 192


def test_a_model_without_recurrent_layers_has_no_cells() -> None:
    plain = KVPool([StateShape.keys_and_values(1, 8)], 2, F32, 5)
    state = plain.open_state()
    state.reserve(3)
    state.snapshot()
    assert (plain.num_cells, state.cell, state.is_recurrent) == (0, -1, False)
    assert state.truncate(1) == 1


def test_a_sequence_begins_with_zeros() -> None:
    of = pool(1)
    for _ in range(2):
        state = of.open_state()
        assert state.cell == -1
        state.reserve(1)
        assert held(of, state) == 0
        fill(of, state, 7)
        state.close()
    assert of.num_free_cells == 1


def test_it_goes_back_to_the_nearest_snapshot() -> None:
    of = pool()
    state = of.open_state()
    for length in (10, 20, 30):
        state.reserve(length)
        fill(of, state, length)
        state.snapshot()
    assert of.num_free_cells == 0  # the oldest snapshot made room
    assert state.truncate(40) == 30
    assert state.truncate(29) == state.length == 20
    assert held(of, state) == 20
    assert of.num_free_cells == 1
    assert state.truncate(19) == 0
    assert held(of, state) == 0
    state.close()
    assert (of.num_free, of.num_free_cells) == (8, 3)


def test_a_lasting_snapshot_makes_room_last() -> None:
    of = pool()
    state = of.open_state()
    for length in (10, 20, 30, 40):
        state.reserve(length)
        fill(of, state, length)
        state.snapshot(lasting=length == 10)
    assert [state.reachable(n) for n in (40, 39, 10)] == [40, 10, 10]
    state.snapshot(lasting=True)  # it is there, and lasts from now on
    state.reserve(50)
    state.snapshot()
    assert [state.reachable(n) for n in (49, 39)] == [40, 0]


def test_more_snapshots_are_kept_where_cells_are_free() -> None:
    of = pool(12)
    state = of.open_state()
    for length in (10, 20, 30, 40):
        state.reserve(length)
        state.snapshot(lasting=length == 10)
    assert [state.reachable(n) for n in (40, 39, 29)] == [40, 30, 10]


def test_a_snapshot_serves_more_than_once() -> None:
    of = pool()
    state = of.open_state()
    state.reserve(10)
    fill(of, state, 3)
    state.snapshot()
    state.snapshot()
    assert of.num_free_cells == 1
    for _ in range(2):
        state.reserve(12)
        fill(of, state, 9)
        assert state.truncate(11) == 10
        assert held(of, state) == 3


def test_running_out_of_cells_says_so_and_takes_no_blocks() -> None:
    of = pool(1)
    first, second = of.open_state(), of.open_state()
    first.reserve(1)
    with pytest.raises(BudgetError, match="all 1 cells of recurrent state are taken"):
        second.reserve(1)
    assert (second.length, of.num_free) == (0, 7)
    first.snapshot()  # no cell, no snapshot: it begins anew then
    first.reserve(5)
    assert first.truncate(4) == 0


def test_a_fork_has_a_copy() -> None:
    of = pool()
    state = of.open_state()
    state.reserve(64)
    fill(of, state, 5)
    child = state.fork(64)
    fill(of, state, 6)
    assert (held(of, child), held(of, state)) == (5, 6)


def test_a_fork_begins_where_the_state_can() -> None:
    of = pool(4)
    state = of.open_state()
    state.reserve(70)
    fill(of, state, 5)
    state.snapshot()
    state.reserve(80)
    fill(of, state, 6)
    assert [state.reachable(n) for n in (69, 70, 79, 80, 99)] == [0, 70, 70, 80, 80]
    child = state.fork(79)
    assert (child.length, held(of, child), len(child.table)) == (70, 5, 2)
    assert child.table[0] == state.table[0]
    assert child.table[1] != state.table[1]
    assert state.fork(50).length == 0
    assert of.num_free_cells == 1
    state.fork(80).reserve(81)
    free = of.num_free
    with pytest.raises(BudgetError, match="all 4 cells"):
        state.fork(80)
    assert of.num_free == free


def test_no_sequence_has_more_than_two_snapshots_where_cells_are_short() -> None:
    of = pool(5)
    state = of.open_state()
    for length in range(1, 6):
        state.reserve(length)
        state.snapshot()
    assert of.num_free_cells == 2
    assert [state.reachable(length) for length in (3, 4, 5)] == [0, 4, 5]


@pytest.mark.parametrize(("stride", "entries"), [(1, 64), (4, 16), (64, 1), (128, 1)])
def test_planes_of_fewer_entries_than_positions(stride: int, entries: int) -> None:
    plane = Plane(2, 16, stride, F32)
    assert plane.entries == entries
    shapes = [StateShape((Plane(1, 4), plane))]
    assert block_nbytes(shapes, BF16) == 64 * 4 * 2 + 2 * entries * 16 * 4
    keys, sparse = KVPool(shapes, 1, BF16).layer(0).planes
    assert (keys.offset, sparse.offset) == (0, 512)
    assert (sparse.format, keys.format) == (F32, BF16)
    assert (sparse.heads, sparse.width, sparse.stride) == (2, 16, stride)


def test_closing_keeps_views_valid() -> None:
    of = pool()
    cells = of.layer(2).cells
    assert cells is not None
    cells.pool[:] = 5
    of.close()
    assert not np.any(cells.pool)


def test_windows_lie_behind_the_state_of_their_layer() -> None:
    """In the format of the pool, each on a boundary of 64 bytes, in every cell."""
    windows = (Window(5, 7), Window(3, 2))
    shapes = (StateShape(cell_nbytes=100), StateShape(cell_nbytes=4, windows=windows))
    for fmt in (F32, BF16, INT8_ROWS):
        pool = KVPool(shapes, 1, fmt, 2)
        first, second = pool.layer(1).windows
        assert pool.layer(0).windows == ()
        assert (first.width, first.positions, first.format) == (5, 7, fmt)
        state = pool.layer(1).cells
        assert state is not None
        assert (state.offset, first.cells.offset) == (128, 128 + 64)
        assert second.cells.offset == first.cells.offset + padded(fmt.nbytes((7, 5)), 64)
        end = second.cells.offset + padded(fmt.nbytes((2, 3)), 64)
        assert pool.cell_nbytes == cell_nbytes(shapes, fmt) == end
