"""What is going on before the first token, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from colibri.settings import Settings
from colibri.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the first word to the user comes before anything is imported
    from rich.console import Console
    from rich.progress import Progress, TaskID

_ERASE_LINE = "\r\x1b[K"
_NOTED_EVERY_S = 30.0


class Rate:
    """How fast something goes since it was first told of, and how long it will take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def told(self, done: int, total: int) -> str:
        """Rate and time left; what was done at the first call took no time."""
        now = self._clock()
        if self._first is None:
            self._first = (now, done)
        began, before = self._first
        if now <= began or done <= before:
            return ""
        rate = (done - before) / (now - began)
        return f"{format_bytes(rate)}/s, {format_seconds((total - done) / rate)} left"


class Reporter:
    """Bars on a terminal, one line elsewhere. `close` clears the bars."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given, self._clock, self._noted_s = console, clock, clock()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._first = False

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return self._given or Console(stderr=True, highlight=False)

    def opening(self, settings: Settings) -> None:
        """Tell a terminal at once what is going on, while the libraries are still imported."""
        self.first(f"opening {settings.model or 'the model'}")

    def first(self, what: str) -> None:
        """The same of anything else; a terminal that is told more forgets it."""
        if sys.stderr.isatty():
            print(f"{what} …", end="", file=sys.stderr, flush=True)
            self._first = True

    def _clear_first(self) -> None:
        if self._first:
            print(_ERASE_LINE, end="", file=sys.stderr, flush=True)
            self._first = False

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` are done in a stage, and how.

        Elsewhere than on a terminal, one line a stage, and one each half minute where there is a
        note.
        """
        if stage not in self._tasks:
            self._begin(stage, total)
        if self._bars is not None:
            self._bars.update(self._tasks[stage], completed=done, total=total, note=note)
        elif note and self._clock() - self._noted_s >= _NOTED_EVERY_S:
            share = f"{done / max(total, 1):.0%}"
            self._console.print(f"{stage}: {share}, {note}", markup=False, soft_wrap=True)
            self._noted_s = self._clock()

    def _begin(self, stage: str, total: int) -> None:
        self._clear_first()
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        if not self._console.is_terminal:
            if not self._tasks:
                self._console.print(f"{stage} …", markup=False, soft_wrap=True)
            self._tasks[stage] = TaskID(len(self._tasks))
            return
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        self._tasks[stage] = self._bars.add_task(stage, total=total, note="")

    def prompt(self, done: int, total: int) -> None:
        """Follow a prompt; the bar goes when it is done, so that text can follow.

        Elsewhere than on a terminal nothing is said: prompts are many.
        """
        if self._console.is_terminal:
            self(f"prompt, {total} tokens", done, total)
            if done == total:
                self.close()

    def close(self) -> None:
        """Clear the bars; a later stage draws new ones."""
        self._clear_first()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._tasks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
