"""A session: the ids of one conversation, their attention state, and the position reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, ForwardModel, Routes, SequenceState
from colibri.engine.passes import Part, run_pass
from colibri.errors import RequestError


class Session:
    """Owns ids and state; both always hold the same positions. Closing gives the blocks back.

    Attributes:
        state: what the model keeps of the ids.
        lock: held during a pass and while blocks are given back, so that neither happens in the
            middle of the other, nor while somebody else reads the state.
        times_rewound: how often it has forgotten positions.
    """

    def __init__(
        self,
        model: ForwardModel,
        state: SequenceState,
        closing: Callable[[Session], None] = lambda _session: None,
    ) -> None:
        """`closing` is called before the blocks are given back."""
        self._model, self._closing = model, closing
        self.state = state
        self._ids: list[int] = []
        self._closed = False
        self.lock = threading.Lock()
        self.times_rewound = 0

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
        leaving = None if cancelled is None else lambda: (0,) if cancelled() else ()
        (logits,) = run_pass(self._model, [Part(self, ids, wanted)], leaving=leaving, routes=routes)
        assert logits is not None  # the only member leaves by Cancelled
        return logits

    def begin(self, count: int) -> None:
        """Make room for `count` more positions, which a pass is going to write.

        Raises:
            RequestError: the session is closed.
            BudgetError, ContextLengthError: there is no room.
        """
        if self._closed:
            raise RequestError("the session is closed: open a new one")
        self.state.reserve(self.position + count)

    def commit(self, ids: NDArray[np.int32]) -> None:
        """A pass has written these."""
        self._ids.extend(ids.tolist())

    def roll_back(self) -> None:
        """A pass has not ended: what it wrote is forgotten. The lock is held."""
        self.times_rewound += 1
        del self._ids[self.state.truncate(self.position) :]

    def rewind(self, length: int) -> None:
        """Forget everything from position `length` on; a recurrent model may forget more."""
        if length < self.position:
            with self.lock:
                self.times_rewound += 1
                del self._ids[self.state.truncate(length) :]

    def fork(self, length: int) -> Session:
        """Another session that begins with the first `length` ids, or fewer if recurrent.

        Raises:
            BudgetError: there is no room.
        """
        other = Session(self._model, self.state.fork(length))
        other._ids = self._ids[: self.state.reachable(length)]
        return other

    @property
    def is_closed(self) -> bool:
        """Whether its blocks are given back."""
        return self._closed

    @property
    def is_recurrent(self) -> bool:
        """Whether it can be rewound to snapshots only, or by `slack` positions."""
        return self.state.is_recurrent

    @property
    def slack(self) -> int:
        """Positions by which a recurrent model's state can be cut."""
        return self.state.slack

    def snapshot(self, length: int | None = None, *, lasting: bool = False) -> None:
        """Remember this position, or an earlier one, for a later `rewind` of a recurrent model.

        A `lasting` one makes room for others last.
        """
        self.state.snapshot(length, lasting=lasting)

    def forget_snapshot(self) -> bool:
        """Make room for others: forget the oldest position that is remembered, if one is."""
        with self.lock:
            return self.state.forget_snapshot()

    def rewind_to_prefix_of(self, ids: Sequence[int]) -> int:
        """Keep what `ids` starts with, but never all of `ids`: its last token has to be run.

        Returns:
            The number of positions kept.
        """
        self.rewind(self.common_prefix(ids))
        return self.position

    def common_prefix(self, ids: Sequence[int]) -> int:
        """With how many of `ids` it begins, the last of them aside."""
        pairs = zip(self._ids, ids[:-1], strict=False)
        differs = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        return min(self.position, len(ids) - 1) if differs is None else differs

    def close(self) -> None:
        """Wait for a pass that is running, then give the blocks back; closing twice is fine."""
        self._closing(self)
        with self.lock:
            if not self._closed:
                self._closed = True
                self._ids.clear()
                self.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
