"""Prompts go through the model in chunks, and a chunk reads each of its experts once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, Progress, Routes
from colibri.engine.session import Session


def prefill(
    session: Session,
    ids: Sequence[int],
    chunk: int,
    *,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> NDArray[np.float32]:
    """Run `ids`, `chunk` tokens a pass; return the logits `[V]` after the last one.

    The last token of a recurrent model's prompt goes alone, behind a snapshot, because the same
    prompt asked again runs it again. `progress(done, total)` is called before the first pass and
    after each.

    Raises:
        Cancelled: asked for between two layers; the passes that ended stay in the session.
    """
    done = 0
    _report(progress, done, len(ids))
    whole = len(ids) - 1 if session.is_recurrent else len(ids)
    for part in (*_chunks(ids[:whole], chunk), *_chunks(ids[whole:], 1)):
        done += len(part)
        last = done == len(ids)
        if last and session.is_recurrent:
            session.snapshot()
        wanted = np.asarray([len(part) - 1] if last else [], np.int32)
        logits = session.extend(part, wanted, cancelled=cancelled)
        _report(progress, done, len(ids))
    last_row: NDArray[np.float32] = logits[0]
    return last_row


def teacher_forced(
    session: Session, ids: Sequence[int], chunk: int, *, routes: Routes | None = None
) -> NDArray[np.float32]:
    """Logits `[T, V]` of every position of `ids [T]`."""
    result = np.empty((0, 0), np.float32)
    for part in _chunks(ids, chunk):
        start, every = session.position, np.arange(len(part), dtype=np.int32)
        logits = session.extend(part, every, routes=routes)
        if not result.size:
            first, result = start, np.empty((len(ids), logits.shape[1]), np.float32)
        result[start - first : session.position - first] = logits
    return result


def _chunks(ids: Sequence[int], size: int) -> Iterator[NDArray[np.int32]]:
    for start in range(0, len(ids), size):
        yield np.asarray(ids[start : start + size], np.int32)


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
