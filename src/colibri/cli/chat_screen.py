"""An answer as it comes: plain text for pipes, markdown and dimmed reasoning for people."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from colibri.cli.run import CONTROLS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.segment import Segment

_DIM, _PLAIN, _ERASE_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_REDRAWN_S = 0.1


class Screen(Protocol):
    """Shows one answer; use it in `with`."""

    def reasoning(self, text: str) -> None:
        """More of what the model thinks."""

    def content(self, text: str) -> None:
        """More of its answer."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the rest."""


def open_screen(*, shows_reasoning: bool, markdown: bool) -> Screen:
    """A screen for stdout, whatever that is."""
    if not sys.stdout.isatty():
        return PlainScreen()
    from rich.console import Console

    console = Console(highlight=False)
    rendered = markdown and not console.is_dumb_terminal
    return TerminalScreen(shows_reasoning, MarkdownText(console) if rendered else None)


class PlainScreen:
    """The answer as it is, nothing else."""

    def __init__(self) -> None:
        self._is_blank = True

    def reasoning(self, text: str) -> None:
        """See `Screen`."""

    def content(self, text: str) -> None:
        """See `Screen`."""
        print(text, end="", flush=True)
        self._is_blank = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not self._is_blank:
            print(flush=True)


class TerminalScreen:
    """Reasoning dimmed, or a word in its place; content as markdown, or as it is."""

    def __init__(self, shows_reasoning: bool, markdown: MarkdownText | None) -> None:
        self._shows_reasoning, self._markdown = shows_reasoning, markdown
        self._thinks = False

    def reasoning(self, text: str) -> None:
        """See `Screen`."""
        if self._shows_reasoning:
            print(f"{_DIM}{harmless(text)}{_PLAIN}", end="", flush=True)
        elif not self._thinks:
            print(f"{_DIM}thinking …{_PLAIN}", end="", flush=True)
        self._thinks = True

    def content(self, text: str) -> None:
        """See `Screen`."""
        self._end_reasoning("\n\n")
        if self._markdown is None:
            print(harmless(text), end="", flush=True)
        else:
            self._markdown.push(harmless(text))

    def _end_reasoning(self, ending: str) -> None:
        if self._thinks:
            print(ending if self._shows_reasoning else _ERASE_LINE, end="", flush=True)
        self._thinks = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_reasoning("\n")
        if self._markdown is None:
            print(flush=True)
        else:
            self._markdown.close()


def harmless(text: str) -> str:
    """A text that moves no cursor."""
    return text.translate(CONTROLS)


class MarkdownText:
    """Markdown that is still being written.

    Blocks that are complete are printed for good; the last one, which may become something else, is
    drawn again as it grows: its end where it is longer than the screen. A thread draws, some times
    a second, so that text comes as fast as it likes and is seen when it stops.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._source = ""
        self._live: Live | None = None
        self._printed = self._is_drawn = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._drawing = threading.Thread(target=self._draw_again, daemon=True)

    def push(self, text: str) -> None:
        """More of it."""
        with self._lock:
            self._source += text
            end = settled(self._source) if "\n" in text else 0
            before, self._source = self._source[:end], self._source[end:]
            self._is_drawn = False
            if before:
                self._draw(before)
        if not self._drawing.is_alive():
            self._drawing.start()

    def close(self) -> None:
        """It ends here."""
        self._closed.set()
        if self._drawing.is_alive():
            self._drawing.join()
        before, self._source = self._source, ""
        self._draw(before)
        if self._live is not None:
            self._live.stop()

    def _draw_again(self) -> None:
        while not self._closed.wait(_REDRAWN_S):
            with self._lock:
                if not self._is_drawn:
                    self._draw()

    def _draw(self, before: str = "") -> None:
        """Print what is complete, and the last block below it."""
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()
        has_text = bool(before.strip())
        self._live.update(_Growing(self._source, self._printed or has_text))
        if has_text:
            self._console.print(*[""] * self._printed, rendered(before), sep="\n")
            self._printed = True
        else:
            self._live.refresh()
        self._is_drawn = True


class _Growing:
    """The last block: as many of its last lines as the screen has, rendered once."""

    def __init__(self, source: str, follows: bool) -> None:
        """`follows`: something stands above it."""
        self._source, self._follows = source, follows
        self._lines: list[list[Segment]] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        if self._lines is None:
            self._lines = self._rendered(console, options)
        for line in self._lines:
            yield from line
            yield Segment.line()

    def _rendered(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        if not self._source.strip():
            return []
        room = max(1, console.height - 2)
        shown = rendered(ending(self._source, room))
        gap: list[list[Segment]] = [[]] if self._follows else []
        lines = gap + console.render_lines(shown, options, pad=False)
        return lines[-room:]


def ending(source: str, num_lines: int) -> str:
    """The last lines of a block; of a fenced one, behind its fence."""
    lines = source.split("\n")
    if len(lines) <= num_lines + 1:
        return source
    fence = [lines[0]] if lines[0].startswith(("```", "~~~")) else []
    return "\n".join([*fence, *lines[-num_lines:]])


def settled(source: str) -> int:
    """How much of the beginning of markdown stays as it is, whatever follows.

    These are all blocks but the last, of the lines that are complete.
    """
    from markdown_it import MarkdownIt

    lines = [f"{line}\n" for line in source.split("\n")[:-1]]
    tokens = MarkdownIt().enable("table").parse("".join(lines))
    begins = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
    return sum(map(len, lines[: begins[-1]])) if begins else 0


def rendered(source: str) -> RenderableType:
    """Markdown for the terminal: headings at the left, addresses of links in full."""
    from colibri.cli.markdown import Markdown

    return Markdown(source, code_theme="ansi_dark", hyperlinks=False)
