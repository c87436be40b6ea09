"""Logits of every position of ids that are all given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, Routes
from colibri.engine.session import Session


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
    result = np.empty((0, 0), np.float32)
    for start in range(0, len(ids), chunk):
        part = np.asarray(ids[start : start + chunk], np.int32)
        every = np.arange(len(part), dtype=np.int32)
        logits = session.extend(part, every, routes=routes, cancelled=cancelled)
        if not start:
            result = np.empty((len(ids), logits.shape[1]), np.float32)
        result[start : start + len(part)] = logits
    return result
