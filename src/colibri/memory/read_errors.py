"""A failed slot, told to people: which file, where, which expert, what next."""

from __future__ import annotations

import os

from colibri.checkpoint.experts import ExpertIndex, ExpertLayerLayout
from colibri.errors import BudgetError, ColibriError, NumericsError, ReadError
from colibri.formats.packing import PackKind
from colibri.memory.jobs import Failure, Reason

_NEXT_STEP = {
    Reason.TRUNCATED: "the file ends before the record does: it was cut while open; restore it",
    Reason.CHECKSUM: "its bytes do not match their checksum: check the drive, or convert again",
    Reason.CANCELLED: "the store was closed before the record was read",
}


def read_error(index: ExpertIndex, row: int, expert: int, failure: Failure) -> ColibriError:
    """The error to raise: NumericsError for floats that are not finite, else ReadError.

    `row` is the layer's row in the index.
    """
    layout = index.layers[row]
    name = f"expert {expert} of layer {layout.layer}"
    place = f"{index.files[failure.file]}, byte {failure.offset}"
    if failure.reason == Reason.NOT_FINITE:
        return NumericsError(
            f"{place}: {layout.parts[failure.part].name} of {name} holds a "
            f"{_not_finite(layout, failure.part)}: "
            "the checkpoint is damaged; download or convert it again"
        )
    if failure.reason == Reason.CANCELLED:
        return ReadError(f"{name}: {_NEXT_STEP[failure.reason]}")
    if failure.reason == Reason.IO:
        return ReadError(
            f"{place}: reading {name} failed ({os.strerror(failure.error)}): check the drive"
        )
    return ReadError(f"{place}: reading {name} failed: {_NEXT_STEP[failure.reason]}")


def _not_finite(layout: ExpertLayerLayout, part: int) -> str:
    """What the checks of a landing look at in a part."""
    fmt, bias = layout.parts[part].format, "" if layout.biases is None else " or bias"
    if any(step.kind == PackKind.ENCODE and step.part == part for step in layout.packings):
        return f"weight{bias} that is not finite, or too large for {fmt}"
    return f"{'scale' if fmt.is_coded else 'weight'}{bias} that is not finite"


def too_many(layer: int, wanted: int, num_idle: int, num_slots: int) -> BudgetError:
    """The error to raise where leases leave less than one of them needs."""
    return BudgetError(
        f"layer {layer}: {wanted} more experts are wanted at once, and {num_idle} of {num_slots} "
        "slots are free: lease fewer at a time (`capacity`), or raise expert_slots"
    )
