"""Logits of every position of ids that are all given: the model's, and its drafting heads'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, Draft, Leaving, Routes
from colibri.engine.passes import Part, run_pass
from colibri.engine.session import Session
from colibri.kernels.api import Batch


def teacher_forced(
    session: Session,
    ids: Sequence[int],
    chunk: int,
    *,
    routes: Routes | None = None,
    cancelled: Cancelled | None = None,
) -> NDArray[np.float32]:
    """Logits `[T, V]` of every position of `ids [T]`, `chunk` tokens a pass.

    Raises:
        Cancelled: asked for between two layers; the passes that ended stay in the session.
    """
    result, start = np.empty((0, 0), np.float32), 0
    for logits in teacher_forced_parts(session, ids, 0, chunk, routes=routes, cancelled=cancelled):
        if not start:
            result = np.empty((len(ids), logits.shape[1]), np.float32)
        result[start : start + len(logits)] = logits
        start += len(logits)
    return result


def teacher_forced_parts(
    session: Session,
    ids: Sequence[int],
    first: int,
    chunk: int,
    *,
    routes: Routes | None = None,
    cancelled: Cancelled | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Logits `[R, V]` of the positions `first` to the end of `ids`, in order, a pass at a time.

    The ids are those that follow what the session holds. A pass of `chunk` tokens ends at `first`,
    and recurrent state is remembered there, so that the session can be rewound to it.

    Raises:
        Cancelled: as `teacher_forced`.
    """
    start = 0
    while start < len(ids):
        end = min(start + chunk, len(ids) if start >= first else first)
        part = np.asarray(ids[start:end], np.int32)
        wanted = np.arange(len(part) if start >= first else 0, dtype=np.int32)
        logits = session.extend(part, wanted, routes=routes, cancelled=cancelled)
        if start >= first:
            yield logits
        elif end == first:
            session.snapshot()
        start = end


class _Drafting:
    """Drafting heads in the place of the model, for one pass; keeps what each of them says."""

    def __init__(self, draft: Draft, following: NDArray[np.int32]) -> None:
        self._draft, self._following = draft, following
        self.logits: list[NDArray[np.float32]] = []

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        leaving: Leaving | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """As `ForwardModel.forward`; the logits are those of the first head."""
        self.logits = self._draft(ids, batch, self._following)
        return self.logits[0][wanted]


def drafted(
    session: Session, ids: Sequence[int], chunk: int, draft: Draft, num_heads: int
) -> list[NDArray[np.float32]]:
    """Logits `[T - 1 - k, V]` of drafting head k: row t foresees the id at t + k + 2.

    Rows at the end, whose following ids are not known, are computed with others and left out.
    """
    known = np.pad(np.asarray(ids, np.int32), (0, num_heads))
    following = np.stack([known[k + 1 :][: len(ids)] for k in range(num_heads)], axis=1)
    found = []
    for start in range(0, len(ids), chunk):
        part = np.asarray(ids[start : start + chunk], np.int32)
        heads = _Drafting(draft, following[start : start + chunk])
        run_pass(heads, [Part(session, part, np.zeros(1, np.int32))])
        found.append(heads.logits)
    whole = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    return [logits[: max(0, len(ids) - 1 - k)] for k, logits in enumerate(whole)]
