"""Conversations on disk: written in the background as replies end, read back when one goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from colibri.engine.session import Session
from colibri.kernels.api import KV_BLOCK
from colibri.kv import Stored, StoredStates
from colibri.kv.stored import BLOCK

Ids = NDArray[np.int32]


class Archive:
    """Saves what sessions hold, file by file, in a thread of its own.

    A session may go on meanwhile: what it held is still there. Once it forgets something, what is
    left of it is not saved.

    Args:
        states: the files.
        note: called with what went wrong and does no harm.
    """

    def __init__(self, states: StoredStates, note: Callable[[str], None]) -> None:
        self._states, self._note = states, note
        self._jobs: SimpleQueue[tuple[Session, Ids, int] | None] = SimpleQueue()
        self._saving: Counter[Session] = Counter()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._works = True

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
        if not self._works:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="colibri-archive", daemon=True)
            self._thread.start()
        with self._changed:
            self._saving[session] += 1
        self._jobs.put((session, np.asarray(session.ids, np.int32), session.times_rewound))

    def find(self, ids: Ids) -> Stored | None:
        """The longest beginning of `ids [T]` that is on disk."""
        return self._states.find(ids)

    def load(self, stored: Stored, session: Session, ids: Ids) -> bool:
        """Read into a session that has room for it and is empty; False where a file is broken.

        That file is removed, and the session is empty again.
        """
        broken = self._states.load(stored, session.state)
        if broken is None:
            session.commit(ids[: stored.length])
            return True
        with session.lock:
            session.roll_back()
        self._note(f"{broken}: broken or cut short, and removed: its prompt is computed again")
        return False

    def close(self) -> None:
        """Write what is left, then end the thread; closing twice is fine."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._works = False

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
                if not holds():
                    return
                self._write(session, ids[:end], path)

    def _write(self, session: Session, ids: Ids, path: Path) -> None:
        """A file that ends where `ids` do; none where the recurrent state has gone on since."""
        state, whole = session.state, len(ids) // KV_BLOCK
        if path.suffix == BLOCK:
            self._states.write(path, ids[-KV_BLOCK:], [state.block(whole - 1)])
            return
        cell = state.cells().get(len(ids))
        if cell is None and session.is_recurrent:
            return
        parts = [state.block(whole)] if len(ids) % KV_BLOCK else []
        tail = ids[whole * KV_BLOCK :]
        self._states.write(path, tail, parts if cell is None else [*parts, cell])
