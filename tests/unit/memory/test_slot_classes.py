"""Division of bytes and slots among record sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import BudgetError
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.null import NullReader
from colibri.memory.slot_classes import (
    divide,
    divide_slots,
    minimum_slots,
    slot_classes,
    slots_nbytes,
)
from tests.unit.memory.records import bare_index

PAGE = 4096
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)
experts = st.integers(1, 9)
active = st.integers(1, 10)


def test_layers_of_one_size_share_a_class() -> None:
    classes = slot_classes(bare_index([3, 1, 3], 8))
    assert [(c.slot_nbytes // PAGE, c.layers, c.num_experts) for c in classes] == [
        (1, (1,), 8),
        (3, (0, 2), 16),
    ]


def test_one_class_takes_what_fits() -> None:
    index = bare_index([2, 2], 8)
    assert divide(5 * 2 * PAGE + 4095, index, 2) == (5,)
    assert divide(1 << 40, index, 2) == (16,)


def test_classes_get_slots_by_their_layers() -> None:
    index = bare_index([1, 4, 4, 4], 100)
    small, large = divide(130 * PAGE, index, 2)
    assert (small, large) == (10, 30)


def test_too_little_says_by_how_much() -> None:
    index = bare_index([1, 4], 8)
    with pytest.raises(BudgetError, match=r"need 40\.0 KiB: raise the budget by 8\.0 KiB"):
        divide(8 * PAGE, index, 2)
    with pytest.raises(BudgetError, match="the least is 4"):
        divide_slots(3, index, 2)


@given(sizes=sizes, experts=experts, active=active, extra=st.integers(0, 400))
def test_bytes_are_used_up_to_one_slot_and_never_exceeded(
    sizes: list[int], experts: int, active: int, extra: int
) -> None:
    index = bare_index(sizes, experts)
    least = minimum_slots(index, active)
    nbytes = slots_nbytes(index, least) + extra * PAGE
    counts = divide(nbytes, index, active)
    used = slots_nbytes(index, counts)
    everything = tuple(found.num_experts for found in slot_classes(index))
    assert all(low <= n <= high for low, n, high in zip(least, counts, everything, strict=True))
    assert used <= nbytes
    assert counts == everything or nbytes - used < max(sizes) * PAGE


@given(sizes=sizes, experts=experts, active=active, extra=st.integers(0, 400))
def test_more_memory_is_never_less_of_anything(
    sizes: list[int], experts: int, active: int, extra: int
) -> None:
    index = bare_index(sizes, experts)
    nbytes = slots_nbytes(index, minimum_slots(index, active)) + extra * PAGE
    fewer, more = divide(nbytes, index, active), divide(nbytes + PAGE, index, active)
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


@given(sizes=sizes, experts=experts, active=active, extra=st.integers(0, 60))
def test_a_number_of_slots_is_exact(
    sizes: list[int], experts: int, active: int, extra: int
) -> None:
    index = bare_index(sizes, experts)
    wanted = sum(minimum_slots(index, active)) + extra
    total = sum(found.num_experts for found in slot_classes(index))
    assert sum(divide_slots(wanted, index, active)) == min(wanted, total)


def test_a_model_without_experts_needs_no_slots() -> None:
    assert divide(123, bare_index([], 0), 0) == ()
    assert divide_slots(0, bare_index([], 0), 0) == ()


@given(small=st.integers(1, 9), large=st.integers(1, 9), share=st.floats(0.1, 1))
def test_two_sizes_keep_four_fifths_of_the_budget_in_use(
    small: int, large: int, share: float
) -> None:
    """After all experts of both sizes were used, that much of the budget holds records."""
    index = bare_index([small, large, small], 16)
    everything = slots_nbytes(index, tuple(found.num_experts for found in slot_classes(index)))
    least = slots_nbytes(index, minimum_slots(index, 2))
    budget = max(least, 5 * max(small, large) * PAGE, int(share * everything))
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], divide(budget, index, 2))
    store = ExpertStore(index, arena, LRU(3 * 16), NullReader(arena), 2)
    for layer in range(3):
        for expert in range(16):
            with store.lease(layer, np.array([expert], np.int32)) as slots:
                store.table.wait(int(slots[0]))
    held = sum(each["ready"] * each["slot_bytes"] for each in store.slot_states())
    assert held >= 0.8 * min(budget, everything)
