"""Idle sessions: state that finished requests left, for those that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.archive import Archive, Arrival
from colibri.engine.session import Session
from colibri.errors import BudgetError
from colibri.kv import common_length


class Prefixes:
    """Idle sessions, the least recently used first. A shared prefix is reference-counted.

    Args:
        open_session: an empty session.
        archive: keeps them on disk too, if given.
    """

    def __init__(self, open_session: Callable[[], Session], archive: Archive | None = None) -> None:
        self._open_session, self._archive = open_session, archive
        self._idle: dict[Session, NDArray[np.int32]] = {}  # with their ids `[T]`

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def sessions(self) -> Sequence[Session]:
        """All that are kept."""
        return tuple(self._idle)

    def borrow(
        self, ids: NDArray[np.int32], running: Iterable[Session] = (), *, idle: bool = True
    ) -> Session:
        """A session that holds as much of `ids [T]` as any does, but never all of it.

        Any of `running`, that is; and of the `idle` ones where they are allowed.

        An idle one that `ids` goes on from is handed out itself; otherwise the common beginning is
        shared, whole blocks of it without a copy.
        """
        donor, length = self._best(ids, running, idle)
        if donor is None:
            return self._open_session()
        kept = self._idle.pop(donor, None)
        if kept is not None and length == len(kept):
            return donor
        fork = self._fork(donor, length)
        if kept is None:
            return fork or self._open_session()
        if fork is None:
            return self._cut(donor, length)
        self._idle[donor] = kept
        return fork

    def longest(
        self, ids: NDArray[np.int32], running: Iterable[Session] = (), *, idle: bool = True
    ) -> int:
        """With how much of `ids [T]` the session begins that `borrow` would find."""
        return self._best(ids, running, idle)[1]

    def _best(
        self, ids: NDArray[np.int32], running: Iterable[Session], idle: bool
    ) -> tuple[Session | None, int]:
        candidates = dict(self._idle) if idle else {}
        candidates |= {s: np.asarray(s.ids, np.int32) for s in running}
        return _longest(ids[:-1], candidates)

    def _fork(self, donor: Session, length: int) -> Session | None:
        """None where there is no room for the block that is not whole, or for a cell."""
        while True:
            try:
                return donor.fork(length)
            except BudgetError:
                if not self.evict():
                    return None

    def _cut(self, donor: Session, length: int) -> Session:
        try:
            donor.rewind(length)
        except BudgetError:  # its last block is another's too
            donor.close()
            return self._open_session()
        return donor

    def keep(self, session: Session) -> None:
        """Its request has ended: others may use what it holds."""
        if session.position:
            self._idle[session] = np.asarray(session.ids, np.int32)
            self.write_down(session)
        else:
            session.close()

    def write_down(self, session: Session) -> None:
        """Keep on disk what it holds, where anything is kept."""
        if self._archive is not None and session.position and not session.is_closed:
            self._archive.save(session)

    def fetch(
        self, ids: NDArray[np.int32], length: int, session: Session | None = None
    ) -> Arrival | None:
        """Begin to read from the disk, where that holds more than `length` of `ids`, not all.

        Into `session`, which is emptied first, or a new one.
        """
        archive = self._archive
        stored = None if archive is None else archive.find(ids[:-1])
        if archive is None or stored is None or stored.length <= length:
            return None
        into = self._open_session() if session is None else session
        if self._make_room(into, stored.length):
            return archive.fetch(stored, into, ids)
        if session is None:
            into.close()
        return None

    def landed(self, arrival: Arrival) -> bool:
        """Whether what was read is there; its session is empty where it is not."""
        return self._archive is not None and self._archive.landed(arrival)

    def wait_for_any(self, arrivals: Sequence[Arrival], seconds: float) -> None:
        """Until one of them is over, or so long."""
        if self._archive is not None:
            self._archive.wait_for_any(arrivals, seconds)

    def _make_room(self, session: Session, length: int) -> bool:
        """Empty it, then give it blocks for so many positions."""
        session.rewind(0)
        while True:
            try:
                session.begin(length)
            except BudgetError:
                if not self.evict():
                    return False
            else:
                return True

    def evict(self) -> bool:
        """Give up the least recently used; False where there is none.

        What is still being written to disk comes last, and is waited for.
        """
        archive = self._archive
        written = (s for s in self._idle if archive is None or not archive.is_saving(s))
        oldest = next(written, None) or next(iter(self._idle), None)
        if oldest is None:
            return False
        if archive is not None:
            archive.wait(oldest)
        del self._idle[oldest]
        oldest.close()
        return True


def _longest(
    ids: NDArray[np.int32], candidates: Mapping[Session, NDArray[np.int32]]
) -> tuple[Session | None, int]:
    """Who can lend most of the beginning of `ids [T]`, and how much; the first of equals."""
    best: tuple[Session | None, int] = None, 0
    for session, held in candidates.items():
        length = session.state.reachable(common_length(held, ids))
        if length > best[1]:
            best = session, length
    return best
