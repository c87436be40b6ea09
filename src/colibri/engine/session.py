"""A session: the ids of one conversation, their attention state, and the position reached."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, ForwardModel, Routes, SequenceState
from colibri.errors import RequestError
from colibri.kernels.api import Batch


class Session:
    """Owns ids and state; both always hold the same positions. Closing gives the blocks back."""

    def __init__(self, model: ForwardModel, state: SequenceState) -> None:
        self._model = model
        self._state = state
        self._ids: list[int] = []
        self._closed = False
        self._lock = threading.Lock()  # nobody gives blocks back in the middle of a pass

    @property
    def ids(self) -> Sequence[int]:
        """The ids whose keys and values are in the state."""
        return self._ids

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self._ids)

    def extend(
        self,
        ids: NDArray[np.int32],
        wanted: NDArray[np.int32],
        *,
        cancelled: Cancelled | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """Run `ids [T]` in one pass; return the logits `[R, V]` of the rows `wanted [R]`.

        A pass that fails or is cancelled leaves the session as it was, or where the model is
        recurrent, as it was at the last snapshot.

        Raises:
            Cancelled: `cancelled()` was true between two layers.
            RequestError: the session is closed.
        """
        with self._lock:
            return self._extend(ids, wanted, cancelled, routes)

    def _extend(
        self,
        ids: NDArray[np.int32],
        wanted: NDArray[np.int32],
        cancelled: Cancelled | None,
        routes: Routes | None,
    ) -> NDArray[np.float32]:
        if self._closed:
            raise RequestError("the session is closed: open a new one")
        start, count = self.position, len(ids)
        try:
            self._state.reserve(start + count)
            batch = Batch(
                positions=np.arange(start, start + count, dtype=np.int32),
                members=np.zeros(count, np.int32),
                block_tables=np.atleast_2d(self._state.table),
                cells=np.full(1, self._state.cell, np.int32),
            )
            logits = self._model.forward(ids, batch, wanted, cancelled=cancelled, routes=routes)
        except BaseException:
            del self._ids[self._state.truncate(start) :]
            raise
        self._ids.extend(ids.tolist())
        return logits

    def rewind(self, length: int) -> None:
        """Forget everything from position `length` on; a recurrent model may forget more."""
        if length < self.position:
            del self._ids[self._state.truncate(length) :]

    @property
    def is_closed(self) -> bool:
        """Whether its blocks are given back."""
        return self._closed

    @property
    def is_recurrent(self) -> bool:
        """Whether it can be rewound to snapshots only."""
        return self._state.is_recurrent

    def snapshot(self) -> None:
        """Remember this position, for a later `rewind` of a recurrent model."""
        self._state.snapshot()

    def rewind_to_prefix_of(self, ids: Sequence[int]) -> int:
        """Keep what `ids` starts with, but never all of `ids`: its last token has to be run.

        Returns:
            The number of positions kept.
        """
        pairs = zip(self._ids, ids[:-1], strict=False)
        kept = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        self.rewind(min(self.position, len(ids) - 1) if kept is None else kept)
        return self.position

    def close(self) -> None:
        """Wait for a pass that is running, then give the blocks back; closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._ids.clear()
                self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
