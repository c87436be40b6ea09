"""One pass of the model over the next tokens of several sessions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import ForwardModel, Leaving, Routes
from colibri.kernels.api import Batch

if TYPE_CHECKING:
    from colibri.engine.session import Session


class Part(NamedTuple):
    """What a pass computes of one session.

    Attributes:
        ids: `[T]` its next tokens.
        wanted: `[R]` which of them logits are wanted after, ascending.
    """

    session: Session
    ids: NDArray[np.int32]
    wanted: NDArray[np.int32]


def run_pass(
    model: ForwardModel,
    parts: Sequence[Part],
    *,
    leaving: Leaving | None = None,
    routes: Routes | None = None,
) -> list[NDArray[np.float32] | None]:
    """Compute all parts together; return the logits `[R, V]` of each, None of those that left.

    Each expert is read once for all. `leaving` is asked between layers which parts leave, by their
    index. A part that left, and all parts where the pass fails, leave their session as it was, or
    where the model is recurrent, as it was at the last snapshot.

    Raises:
        Cancelled: all parts left.
        BudgetError, ContextLengthError: there is no room for a part.
        NumericsError, ReadError: `members` are indices of the parts they concern.
        RequestError: a session is closed.
    """
    left: set[int] = set()

    def departing() -> Sequence[int]:
        new = () if leaving is None else leaving()
        left.update(new)
        return new

    with ExitStack() as held:
        for part in parts:
            held.enter_context(part.session.lock)
        try:
            for part in parts:
                part.session.begin(len(part.ids))
            ids, batch, wanted = _joined(parts)
            logits = model.forward(ids, batch, wanted, leaving=departing, routes=routes)
        except BaseException:
            for part in parts:
                part.session.roll_back()
            raise
        return _divided(parts, left, logits)


def _joined(
    parts: Sequence[Part],
) -> tuple[NDArray[np.int32], Batch, NDArray[np.int32]]:
    """The rows of all parts, one behind the other."""
    if len(parts) == 1:
        return _alone(parts[0])
    sizes = [len(part.ids) for part in parts]
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    states = [part.session.state for part in parts]
    positions = [
        np.arange(n, dtype=np.int32) + p.session.position for n, p in zip(sizes, parts, strict=True)
    ]
    batch = Batch(
        positions=np.concatenate(positions),
        members=np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
        block_tables=_tables([state.table for state in states]),
        cells=np.array([state.cell for state in states], np.int32),
    )
    wanted = np.concatenate(
        [part.wanted + start for part, start in zip(parts, starts, strict=True)]
    )
    return np.concatenate([part.ids for part in parts]), batch, wanted.astype(np.int32)


def _alone(part: Part) -> tuple[NDArray[np.int32], Batch, NDArray[np.int32]]:
    """The same for one part, which most passes have: a decode step is short."""
    start, rows, state = part.session.position, len(part.ids), part.session.state
    batch = Batch(
        positions=np.arange(start, start + rows, dtype=np.int32),
        members=np.zeros(rows, np.int32),
        block_tables=state.table[None],
        cells=np.array((state.cell,), np.int32),
    )
    return part.ids, batch, part.wanted


def _tables(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """`[S, B]`, -1 behind the shorter ones."""
    together = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in zip(together, tables, strict=True):
        row[: len(table)] = table
    return together


def _divided(
    parts: Sequence[Part], left: set[int], logits: NDArray[np.float32]
) -> list[NDArray[np.float32] | None]:
    """Commit each part that stayed, and give it its rows."""
    found: list[NDArray[np.float32] | None] = []
    start = 0
    for index, part in enumerate(parts):
        if index in left:
            part.session.roll_back()
            found.append(None)
            continue
        part.session.commit(part.ids)
        found.append(logits[start : start + len(part.wanted)])
        start += len(part.wanted)
    return found
