"""Conversations on disk: written in the background as replies end, read back when one goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from colibri.engine.session import Session
from colibri.formats import Bytes
from colibri.kernels.api import KV_BLOCK
from colibri.kv import Stored, StoredStates
from colibri.kv.stored import BLOCK

Ids = NDArray[np.int32]


class Arrival:
    """A beginning of some ids on its way from the disk into an empty session.

    Attributes:
        session: which nobody else uses before it is over; its blocks are being written.
        stored: what is read.
        ids: `[T]` that begin so.
        broken: the file that was found to be.
        is_whole: whether all of it was read.
        is_over: whether reading has ended, in whatever way.
        is_abandoned: whether nobody wants it any more.
    """

    def __init__(self, session: Session, stored: Stored, ids: Ids) -> None:
        self.session, self.stored, self.ids = session, stored, ids
        self.broken: Path | None = None
        self.is_whole = self.is_over = self.is_abandoned = False

    def abandon(self) -> None:
        """Read no more: waits for the file that is being read, then empties the session."""
        self.is_abandoned = True
        with self.session.lock:
            if not self.session.is_closed:
                self.session.roll_back()


class Archive:
    """Saves what sessions hold and reads it back, file by file, in threads of its own.

    A session may go on while it is saved: what it held is still there. Once it forgets something,
    what is left of it is not saved. Neither thread keeps a session's lock for more than one file.

    Args:
        states: the files.
        note: called with what went wrong and does no harm.
    """

    def __init__(self, states: StoredStates, note: Callable[[str], None]) -> None:
        self._states, self._note = states, note
        self._jobs: SimpleQueue[tuple[Session, Ids, int] | None] = SimpleQueue()
        self._arrivals: SimpleQueue[Arrival | None] = SimpleQueue()
        self._saving: Counter[Session] = Counter()
        self._changed = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        self._works = True
        self._closed = False

    @property
    def num_saving(self) -> int:
        """Sessions that are not written yet."""
        return len(self._saving)

    def is_saving(self, session: Session) -> bool:
        """Whether it is not written yet."""
        return session in self._saving

    def wait(self, session: Session) -> None:
        """Until it is written."""
        with self._changed:
            self._changed.wait_for(lambda: session not in self._saving)

    def save(self, session: Session) -> None:
        """Write what it holds now, soon."""
        if not self._works or self._closed:
            return
        self._start("colibri-archive", self._run)
        with self._changed:
            self._saving[session] += 1
        self._jobs.put((session, np.asarray(session.ids, np.int32), session.times_rewound))

    def find(self, ids: Ids) -> Stored | None:
        """The longest beginning of `ids [T]` that is on disk."""
        return None if self._closed else self._states.find(ids)

    def fetch(self, stored: Stored, session: Session, ids: Ids) -> Arrival:
        """Begin to read into a session that has room for it and is empty; see `landed`."""
        arrival = Arrival(session, stored, ids)
        self._start("colibri-archive-reads", self._read)
        self._arrivals.put(arrival)
        return arrival

    def wait_for_any(self, arrivals: Sequence[Arrival], seconds: float) -> None:
        """Until one of them is over, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: any(each.is_over for each in arrivals), seconds)

    def landed(self, arrival: Arrival) -> bool:
        """Whether the session now holds what was read; where a file was broken it is empty again.

        That file was removed.
        """
        session, length = arrival.session, arrival.stored.length
        if arrival.is_whole and not arrival.is_abandoned:
            session.commit(arrival.ids[:length])
            return True
        arrival.abandon()
        if arrival.broken is not None:
            self._note(
                f"{arrival.broken}: broken or cut short, and removed: its prompt is computed again"
            )
        return False

    def close(self) -> None:
        """Write what is left, read no more, and end the threads; closing twice is fine."""
        self._closed = True
        for queue in (self._jobs, self._arrivals):
            queue.put(None)
        while self._threads:
            self._threads.popitem()[1].join()
        self._works = False

    def _start(self, name: str, run: Callable[[], None]) -> None:
        if name not in self._threads:
            self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
            self._threads[name].start()

    def _read(self) -> None:
        while (arrival := self._arrivals.get()) is not None:
            try:
                self._fill(arrival)
            finally:
                with self._changed:
                    arrival.is_over = True
                    self._changed.notify_all()

    def _fill(self, arrival: Arrival) -> None:
        session, stored = arrival.session, arrival.stored
        for index in range(stored.num_files):
            with session.lock:
                if self._closed or arrival.is_abandoned or session.is_closed:
                    return
                arrival.broken = self._states.load(stored, index, session.state)
            if arrival.broken is not None:
                return
        arrival.is_whole = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._works:
                    self._save(*job)
            except Exception as error:  # whatever it is: whoever waits must not wait for ever
                self._works = False
                self._note(f"conversations are not kept on disk any more: {error}")
            finally:
                with self._changed:
                    self._saving -= Counter((job[0],))
                    self._changed.notify_all()

    def _save(self, session: Session, ids: Ids, times_rewound: int) -> None:
        def holds() -> bool:
            return not session.is_closed and session.times_rewound == times_rewound

        with session.lock:
            lengths = [n for n in session.state.cells() if n <= len(ids)] if holds() else []
        for end, path in self._states.missing(ids, lengths):
            with session.lock:
                parts = self._copied(session, ids[:end], path) if holds() else None
            if parts is None:
                return
            if parts:
                start = (end - 1 if path.suffix == BLOCK else end) // KV_BLOCK * KV_BLOCK
                self._states.write(path, ids[start:end], parts)

    def _copied(self, session: Session, ids: Ids, path: Path) -> list[Bytes]:
        """What belongs in a file that ends where `ids` do; nothing where that is gone.

        A recurrent state may have gone on since.
        """
        state, whole = session.state, len(ids) // KV_BLOCK
        if path.suffix == BLOCK:
            return [state.block(whole - 1).copy()]
        cell = state.cells().get(len(ids))
        if cell is None and session.is_recurrent:
            return []
        parts = [state.block(whole)] if len(ids) % KV_BLOCK else []
        return [part.copy() for part in (parts if cell is None else [*parts, cell])]
