"""Who did what when: a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

The file is one JSON array, an event a line. Complete events ("X") nest on the track of the thread
that they ran on; what a span did outside of the spans within it is Python. Reads overlap, so they
are pairs of async events ("b", "e"). `cat` says what kind of work it is: `kernel` (a native call),
`wait` (for records, inside a kernel), `read` (a record, on the reader's threads), `python` (all
else). Lines are written between steps; a process that is killed leaves all but the closing bracket,
which the viewers do without.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec, TextIO, TypeVar

from colibri.errors import SettingsError

Kind = Literal["kernel", "wait", "read", "python"]
P = ParamSpec("P")
R = TypeVar("R")

now_ns = time.monotonic_ns  # the clock of the native library


class Spans:
    """Writes down spans of time; any thread may."""

    def __init__(self, path: Path) -> None:
        """Begin the file anew.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SettingsError(
                f"profile is {path}: {error.strerror}: name a file that can be written"
            ) from None
        self._start, self._process = now_ns(), os.getpid()
        self._tracks: dict[int, int] = {}
        self._writing = threading.Lock()
        self._lines: list[str] = []
        self._num_reads = 0
        self._file.write("[\n")
        self._event("M", "process_name", args={"name": "colibri"})
        self._event("M", "began", args={"monotonic_ns": self._start})

    def add(self, name: str, kind: Kind, begin_ns: int, end_ns: int, **told: Any) -> None:
        """A span of the calling thread."""
        length = round((end_ns - begin_ns) / 1000, 3)
        self._event("X", name, begin_ns, cat=kind, dur=length, tid=self._track(), args=told)

    def read(self, name: str, begin_ns: int, end_ns: int, **told: Any) -> None:
        """A read, which may overlap others."""
        self._num_reads += 1
        same = {"cat": "read", "id": self._num_reads, "tid": 0}
        self._event("b", name, begin_ns, **same, args=told)
        self._event("e", name, end_ns, **same)

    @contextmanager
    def span(self, name: str, kind: Kind = "python", **told: Any) -> Iterator[None]:
        """The time that a block takes."""
        begin = now_ns()
        try:
            yield
        finally:
            self.add(name, kind, begin, now_ns(), **told)

    def timed(self, function: Callable[P, R], name: str, kind: Kind = "python") -> Callable[P, R]:
        """The same function, each call of which is a span."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = now_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, kind, begin, now_ns())

        return call

    def flush(self) -> None:
        """Write what has gathered, while nothing is being measured."""
        with self._writing:
            lines, self._lines = self._lines, []
            if not self._file.closed:
                self._file.writelines(lines)

    def close(self, **told: Any) -> None:
        """End the file, with figures of the whole run; closing twice is fine."""
        if not self._file.closed:
            self._event("M", "run", args=told)
            self.flush()
            self._file.write("{}]\n")
            self._file.close()

    def _track(self) -> int:
        thread = threading.get_ident()
        if thread not in self._tracks:
            self._tracks[thread] = number = len(self._tracks) + 1
            name = threading.current_thread().name
            self._event("M", "thread_name", tid=number, args={"name": name})
        return self._tracks[thread]

    def _event(self, phase: str, name: str, at_ns: int | None = None, **rest: Any) -> None:
        at = {} if at_ns is None else {"ts": round((at_ns - self._start) / 1000, 3)}
        event = {"ph": phase, "name": name, "pid": self._process, **at, **rest}
        self._lines.append(json.dumps(event, separators=(",", ":")) + ",\n")
