"""Blocks of the K/V pool and the sequences that borrow them."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri.errors import BudgetError, ContextLengthError
from colibri.formats import BF16, F32
from colibri.kv import KVPool, KVState, StateShape, block_nbytes

SHAPES = (StateShape.keys_and_values(2, 8), StateShape.keys_and_values(1, 6))


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    sizes = [2 * 2 * 64 * 8 * 2, 2 * 1 * 64 * 6 * 2]
    assert block_nbytes(SHAPES, BF16) == sum(sizes)
    pool = KVPool(SHAPES, 3, BF16)
    (first, _), (second, values) = pool.layer(0).planes, pool.layer(1).planes
    assert values.offset - second.offset == sizes[1] // 2
    assert (first.offset, second.offset) == (0, sizes[0])
    assert first.block_nbytes == second.block_nbytes == pool.block_nbytes == sum(sizes)
    assert first.pool.size == 3 * sum(sizes)
    assert first.pool.ctypes.data % 64 == second.offset % 64 == sum(sizes) % 64 == 0
    assert (second.heads, second.width, second.format) == (1, 6, BF16)


def test_a_sequence_borrows_as_it_grows() -> None:
    pool = KVPool(SHAPES, 4, F32)
    state = pool.open_state()
    assert state.table.tolist() == []
    state.reserve(1)
    state.reserve(64)
    assert state.table.tolist() == [0]
    state.reserve(65)
    assert (state.table.tolist(), state.table.dtype) == ([0, 1], np.int32)
    state.reserve(3)
    assert (state.length, pool.num_free) == (65, 2)
    state.truncate(64)
    assert (state.table.tolist(), pool.num_free) == ([0], 3)
    state.truncate(0)
    assert pool.num_free == 4
    state.close()
    state.close()
    assert pool.num_free == 4


def test_running_out_says_so_and_changes_nothing() -> None:
    pool = KVPool(SHAPES, 4, F32)
    first, second = pool.open_state(), pool.open_state()
    first.reserve(130)
    second.reserve(5)
    with pytest.raises(BudgetError, match="0 of 4 blocks of 64 positions free, 1 are needed"):
        second.reserve(65)
    assert (second.length, second.table.tolist()) == (5, [3])
    with pytest.raises(ContextLengthError, match="257 positions need 5 blocks"):
        second.reserve(257)
    first.close()
    second.reserve(256)
    assert pool.num_free == 0


def test_a_shared_prefix_is_not_copied_until_it_is_written_to() -> None:
    pool = KVPool(SHAPES, 5, F32)
    parent = pool.open_state()
    parent.reserve(150)
    data = pool.layer(0).planes[0].pool
    data[pool.block_nbytes : 2 * pool.block_nbytes] = 9
    child = parent.fork(128)
    assert child.table.tolist() == parent.table[:2].tolist()
    child.reserve(129)
    assert child.table[2] not in parent.table
    parent.close()
    child.truncate(100)
    assert child.table.tolist() == [0, 1]  # nobody else owns them any more
    other = child.fork(64)
    assert pool.num_free == 3
    child.truncate(10)
    own = int(child.table[0])
    assert own != other.table[0]
    other.close()
    child.close()
    assert pool.num_free == 5


def test_the_copy_of_a_shared_block_has_its_contents() -> None:
    pool = KVPool(SHAPES, 3, F32)
    parent = pool.open_state()
    parent.reserve(64)
    data = pool.layer(0).planes[0].pool
    data[: pool.block_nbytes] = np.arange(pool.block_nbytes, dtype=np.uint64).astype(np.uint8)
    child = parent.fork(64)
    child.truncate(20)
    block = int(child.table[0])
    assert block != 0
    copied = data[block * pool.block_nbytes : (block + 1) * pool.block_nbytes]
    assert np.array_equal(copied, data[: pool.block_nbytes])


def test_a_fork_copies_the_block_that_is_not_whole() -> None:
    pool = KVPool(SHAPES, 4, F32)
    state = pool.open_state()
    state.reserve(100)
    data = pool.layer(0).planes[0].pool
    data[pool.block_nbytes : 2 * pool.block_nbytes] = 7
    child = state.fork(90)
    assert (child.length, child.table.tolist(), state.table.tolist()) == (90, [0, 2], [0, 1])
    assert (data[2 * pool.block_nbytes : 3 * pool.block_nbytes] == 7).all()
    assert state.fork(1000).length == 100
    with pytest.raises(BudgetError, match="0 of 4 blocks"):
        state.fork(100)
    assert state.fork(64).table.tolist() == [0]


def test_what_is_missing_is_known_before() -> None:
    state = KVPool(SHAPES, 3, F32).open_state()
    assert [state.missing(n) for n in (0, 1, 65)] == [(0, 0), (1, 0), (2, 0)]
    state.reserve(64)
    assert [state.missing(n) for n in (64, 65)] == [(0, 0), (1, 0)]
    recurrent = KVPool([StateShape(cell_nbytes=8)], 3, F32, 1).open_state()
    assert recurrent.missing(1) == (1, 1)
    recurrent.reserve(1)
    assert recurrent.missing(1) == (0, 0)


def test_closing_keeps_views_valid() -> None:
    pool = KVPool(SHAPES, 2, F32)
    data = pool.layer(1).planes[1].pool
    data[:] = 5
    pool.close()
    assert not data.any()


class Sequences(RuleBasedStateMachine):
    """Any number of sequences: every block is owned by exactly those that show it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SHAPES, 8, F32)
        self.states: list[KVState] = []

    def any_state(self, data: st.DataObject) -> KVState:
        return self.states[data.draw(st.integers(0, len(self.states) - 1))]

    @rule()
    def open(self) -> None:
        self.states.append(self.pool.open_state())

    @precondition(lambda self: self.states)
    @rule(data=st.data(), length=st.integers(0, 300))
    def reserve(self, data: st.DataObject, length: int) -> None:
        state = self.any_state(data)
        more = -(-length // 64) - len(state.table)
        if more > self.pool.num_free:
            with pytest.raises((BudgetError, ContextLengthError)):
                state.reserve(length)
        else:
            before = state.length
            state.reserve(length)
            assert state.length == max(before, length)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), length=st.integers(0, 300))
    def truncate(self, data: st.DataObject, length: int) -> None:
        state = self.any_state(data)
        before = state.length
        try:
            state.truncate(length)
        except BudgetError:
            assert self.pool.num_free == 0
        else:
            assert state.length == min(before, length)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        state = self.any_state(data)
        length = data.draw(st.integers(0, state.length))
        if length % 64 and not self.pool.num_free:
            with pytest.raises(BudgetError):
                state.fork(length)
        else:
            self.states.append(state.fork(length))
            assert self.states[-1].length == length

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        state = self.any_state(data)
        state.close()
        self.states.remove(state)

    @invariant()
    def blocks_belong_to_those_that_show_them(self) -> None:
        owners = np.zeros(8, int)
        for state in self.states:
            assert len(state.table) == -(-state.length // 64)
            owners[state.table] += 1
        assert owners.tolist() == self.pool._owners.tolist()
        partial = [state.table[-1] for state in self.states if state.length % 64]
        assert all(owners[block] == 1 for block in partial)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
