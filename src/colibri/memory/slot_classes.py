"""How many slots of which size: pure functions, used by the plan and by whoever carries it out.

Slots are handed out in one fixed order, and a larger budget takes a longer prefix of it. So more
memory never means fewer slots of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import BudgetError
from colibri.units import format_bytes


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Records of one resident size share slots.

    Attributes:
        slot_nbytes: bytes of a slot, a multiple of 4096.
        layers: the MoE layers, as rows of the index, whose records have this size.
        num_experts: experts of all those layers together.
        largest_layer: experts of the largest of them.
    """

    slot_nbytes: int
    layers: tuple[int, ...]
    num_experts: int
    largest_layer: int


def slot_classes(index: ExpertIndex) -> tuple[SlotClass, ...]:
    """The classes of a model, by ascending size."""
    by_size: dict[int, list[int]] = {}
    for row, layout in enumerate(index.layers):
        by_size.setdefault(layout.slot_nbytes, []).append(row)
    return tuple(_slot_class(index, size, rows) for size, rows in sorted(by_size.items()))


def _slot_class(index: ExpertIndex, size: int, rows: list[int]) -> SlotClass:
    counts = [index.layers[row].num_experts for row in rows]
    return SlotClass(size, tuple(rows), sum(counts), max(counts))


def minimum_slots(index: ExpertIndex, active: int) -> tuple[int, ...]:
    """The fewest slots of each class: one layer's active set, `active` experts."""
    return tuple(min(active, found.largest_layer) for found in slot_classes(index))


def divide(nbytes: int, index: ExpertIndex, active: int) -> tuple[int, ...]:
    """The slots of each class that `nbytes` pay for; what is left over is less than one slot.

    Raises:
        BudgetError: not even the minimum fits; says by how much.
    """
    classes, counts = slot_classes(index), minimum_slots(index, active)
    left = nbytes - slots_nbytes(index, counts)
    if left < 0:
        raise BudgetError(
            f"{format_bytes(nbytes)} are left for experts, but one layer's {active} active ones "
            f"need {format_bytes(nbytes - left)}: raise the budget by {format_bytes(-left)}"
        )
    order = _order(classes, counts)
    sizes = np.array([found.slot_nbytes for found in classes], np.int64)[order]
    taken = int(np.searchsorted(np.cumsum(sizes), left, side="right"))
    return _grown(counts, order[:taken])


def divide_slots(num_slots: int, index: ExpertIndex, active: int) -> tuple[int, ...]:
    """Exactly `num_slots` slots divided among the classes.

    Raises:
        BudgetError: fewer than the minimum. More than all experts is as good as all of them.
    """
    classes, counts = slot_classes(index), minimum_slots(index, active)
    if num_slots < sum(counts):
        raise BudgetError(
            f"expert_slots is {num_slots}, but one layer's {active} active experts must be in "
            f"memory together: the least is {sum(counts)}"
        )
    return _grown(counts, _order(classes, counts)[: num_slots - sum(counts)])


def slots_nbytes(index: ExpertIndex, counts: Sequence[int]) -> int:
    """Bytes of `counts` slots of each class."""
    return sum(n * found.slot_nbytes for n, found in zip(counts, slot_classes(index), strict=True))


def _order(classes: Sequence[SlotClass], counts: Sequence[int]) -> NDArray[np.intp]:
    """The class of each slot beyond the minimum, in the order in which they are handed out.

    All layers have as many active experts, so a class's share of slots is its share of layers.
    """
    extra = [np.arange(n, found.num_experts) for n, found in zip(counts, classes, strict=True)]
    owner = np.repeat(np.arange(len(classes)), [len(numbers) for numbers in extra])
    layers = np.array([len(found.layers) for found in classes])
    if not classes:
        return owner
    fill = (np.concatenate(extra) + 1) / layers[owner]
    return owner[np.lexsort((owner, fill))]


def _grown(counts: Sequence[int], owners: NDArray[np.intp]) -> tuple[int, ...]:
    extra = np.bincount(owners, minlength=len(counts))
    return tuple(n + int(more) for n, more in zip(counts, extra, strict=True))
