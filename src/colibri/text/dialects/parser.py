"""Reads a reply piece by piece: what it yields does not depend on how the text was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from colibri.text.dialects.bodies import json_for
from colibri.text.dialects.dialect import CallSyntax, Dialect, Header, Tools
from colibri.text.dialects.events import CallEvent, Channel, Event, TextDelta, ToolCall, told_whole
from colibri.text.dialects.readers import CallReader, leftover, pending

Action = Callable[["ReplyParser"], None]


class ReplyParser:
    """Splits a reply into content, reasoning and tool calls.

    Joined by channel, the events of every `push` and one `finish` are the same wherever the text
    was cut. Markers count only where they can mean something: reasoning opens before any content,
    a closing that closes nothing is dropped there and is text elsewhere. A tool call begins when
    its name and the beginning of its arguments have been read, and arguments are yielded as they
    come, or whole where the syntax says too late what they are. What looks like a call and has
    neither stays content, as it was written.

    Line ends are left out at both ends of reasoning, before content that follows it, and around
    tool calls, where templates put their own.
    """

    def __init__(self, dialect: Dialect, tools: Tools | None = None, *, prompt: str = "") -> None:
        """Begin a reply.

        Args:
            dialect: how it is spelled.
            tools: argument schemas by function; None where calls are not looked for.
            prompt: how the rendered prompt ends, which may have opened reasoning.
        """
        self._dialect = dialect
        self._tools = tools
        self._calls = () if tools is None else dialect.calls
        self._text = ""
        self._out: list[Event] = []
        self._content = _Channel(Channel.CONTENT)
        self._mode: _Mode = _Content()
        reasoning_end = dialect.reasoning_end(prompt)
        if reasoning_end is not None:
            self._mode = _Reasoning(reasoning_end)
        elif dialect.header is not None and dialect.header.is_open(prompt):
            self._mode = _Header("")

    @property
    def is_content(self) -> bool:
        """Whether what comes next is content, as far as is known."""
        return isinstance(self._mode, _Content)

    def push(self, text: str) -> list[Event]:
        """Take more text; return what it makes certain."""
        self._text += text
        if text:
            while self._step():
                pass
        return self._taken()

    def finish(self) -> list[Event]:
        """Return what was held back, once the reply has ended."""
        while self._text or isinstance(self._mode, _Call) or self._ends_with_opening:
            if not self._step() and not self._end():
                break
        self._emit(self._content.finish())
        return self._taken()

    @property
    def _ends_with_opening(self) -> bool:
        """Whether there is nothing behind the opening of a header that may be text."""
        header, mode = self._dialect.header, self._mode
        return isinstance(mode, _Header) and header is not None and bool(header.others)

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _emit(self, events: Iterable[Event]) -> None:
        self._out.extend(events)

    def _step(self) -> bool:
        """Take what is certain off the text; whether a marker was found."""
        match self._mode:
            case _Call() as mode:
                return self._step_call(mode)
            case _Header() as mode:
                return self._step_header(mode)
            case mode:
                return self._step_text(mode)

    def _step_text(self, mode: _Content | _Reasoning) -> bool:
        actions = self._actions(mode)
        found = _first(self._text, actions)
        if found is None:
            keep = pending(self._text, tuple(actions))
            self._show(mode, self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        at, marker = found
        self._show(mode, self._text[:at])
        self._text = self._text[at + len(marker) :]
        actions[marker](self)
        return True

    def _show(self, mode: _Content | _Reasoning, text: str) -> None:
        channel = mode.channel if isinstance(mode, _Reasoning) else self._content
        self._emit(channel.push(text))

    def _actions(self, mode: _Content | _Reasoning) -> dict[str, Action]:
        """What markers mean here."""
        header = self._dialect.header
        actions: dict[str, Action] = {}
        if isinstance(mode, _Reasoning):
            actions = {m: _end_message for m in self._dialect.dropped if _is_barred(m)}
            actions |= {c.opening: _open(c) for c in self._calls if _is_barred(c.opening)}
            actions |= dict.fromkeys(mode.closings, _end_message)
        else:
            actions = dict.fromkeys(self._dialect.dropped, _drop)
            actions |= {call.opening: _open(call) for call in self._calls}
            for opening, closing in self._dialect.reasoning:
                actions |= {opening: _open_reasoning(opening, closing)}
                actions.setdefault(closing, _stray(closing))
        if header is not None:
            actions |= dict.fromkeys(header.ends, _end_message)
            actions |= {opening: _open_header(opening) for opening in header.openings}
        return actions

    def _step_call(self, mode: _Call) -> bool:
        end = mode.syntax.end(self._text)
        if end is None:
            self._read(mode, len(self._text) - pending(self._text, mode.syntax.closings))
            return False
        self._finish_call(mode, *end)
        return True

    def _read(self, mode: _Call, end: int) -> None:
        """Tell what is certain of a call, whose text goes to `end` as far as it is known."""
        if mode.reader is None or end <= mode.num_read:
            return
        events = mode.reader.push(self._text[mode.num_read : end])
        mode.num_read = end
        if events:
            self._content.cut()
            self._emit(events)

    def _finish_call(self, mode: _Call, start: int, end: int) -> None:
        self._read(mode, start)
        body = self._text[:start]
        if self._text[start:end] == mode.syntax.opening:  # it opens the next call
            end = start
        written, self._text = self._text[:end], self._text[end:]
        self._mode = _Content()
        calls = mode.parse(body, self._tools or {})
        if mode.is_told:
            self._emit(mode.finish())
        if calls is not None:
            self._content.cut()
            self._emit(told_whole(calls[mode.num_calls :]))
        elif mode.is_told:
            self._emit(self._content.push(mode.leftover()))
        else:
            self._emit(self._content.push(mode.opening + written))

    def _step_header(self, mode: _Header) -> bool:
        header = self._dialect.header
        at = self._text.find(header.closing) if header is not None else -1
        if header is None or at < 0:
            return False
        words = self._text[:at]
        written, self._text = self._text[: at + len(header.closing)], self._text[at:]
        self._text = self._text[len(header.closing) :]
        tools, name = self._tools, _recipient(header, words)
        if name is not None and tools is not None and (not header.others or name in tools):
            self._content.cut()
            self._mode = _Call(_body_call(header, name), "", tools)
        elif header.reasoning is not None and header.reasoning in words:
            self._mode = _Reasoning(*header.ends)
        else:
            if header.others and words not in header.others:
                self._emit(self._content.push(mode.opening + written))
            self._mode = _Content()
        return True

    def _end(self) -> bool:
        """Deal with what is still open when the reply ends; whether there is more to read."""
        text, mode = self._text, self._mode
        if isinstance(mode, _Call):
            self._read(mode, len(text))
            if mode.is_told:
                self._finish_call(mode, len(text), len(text))
                return False
            calls = mode.parse(text, self._tools or {})
            end = mode.syntax.end(text, at_end=True)
            if calls is None and end is not None:
                self._finish_call(mode, *end)
                return True
            self._finish_call(mode, len(text), len(text))
            return False
        if isinstance(mode, _Header):
            self._mode = _Content()
            self._emit(self._content.push(mode.opening + text))
        else:
            self._show(mode, text)
        self._text = ""
        return False


@dataclass
class _Channel:
    """Text of one channel, without the line ends that templates write themselves."""

    channel: Channel
    strips: bool = False
    is_blank: bool = True
    _held: str = ""

    def push(self, text: str) -> Iterator[Event]:
        text = self._held + text
        if self.strips:
            text = text.lstrip("\n")
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self.strips, self.is_blank = False, False
            yield TextDelta(self.channel, shown)

    def cut(self) -> None:
        """Something else follows: blanks that were held back are not part of it."""
        self._held, self.strips = "", True

    def finish(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        if held:
            yield TextDelta(self.channel, held)


@dataclass
class _Content:
    """Content is being read."""


@dataclass(init=False)
class _Reasoning:
    """Reasoning is being read."""

    closings: tuple[str, ...]
    channel: _Channel

    def __init__(self, *closings: str) -> None:
        self.closings = closings
        self.channel = _Channel(Channel.REASONING, strips=True)


class _Call:
    """A tool call is being read.

    Attributes:
        num_read: letters behind the opening that the reader has had.
    """

    def __init__(self, syntax: CallSyntax, opening: str, tools: Tools) -> None:
        self.syntax, self.opening, self.num_read = syntax, opening, 0
        self._kept = opening * syntax.keeps_opening
        make = syntax.body.reader
        self.reader: CallReader | None = None if make is None else make(tools)
        if self.reader is not None:
            self.reader.push(self._kept)

    @property
    def num_calls(self) -> int:
        """Calls that were told before they ended."""
        return 0 if self.reader is None else self.reader.num_calls

    @property
    def is_told(self) -> bool:
        """Whether there are any."""
        return self.num_calls > 0

    def parse(self, body: str, tools: Tools) -> list[ToolCall] | None:
        """All calls."""
        return self.syntax.body.parse(self._kept + body, tools)

    def finish(self) -> list[CallEvent]:
        """What was held back of the last call."""
        return [] if self.reader is None else self.reader.finish()

    def leftover(self) -> str:
        """Text behind a call that is no part of it."""
        rest = "" if self.reader is None else self.reader.rest
        return leftover(rest[: len(rest) - pending(rest, self.syntax.closings)])


@dataclass
class _Header:
    """The header of a message is being read."""

    opening: str


_Mode = _Content | _Reasoning | _Call | _Header


def _first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def _is_barred(marker: str) -> bool:
    """Whether a marker is no text even where a model thinks aloud about markers."""
    return "|" in marker or "\uff5c" in marker


def _drop(parser: ReplyParser) -> None:
    """A marker that says nothing."""


def _end_message(parser: ReplyParser) -> None:
    """Whatever was being read is over."""
    parser._content.cut()
    parser._mode = _Content()


def _as_text(parser: ReplyParser, marker: str) -> None:
    parser._emit(parser._content.push(marker))


def _stray(closing: str) -> Action:
    """A closing that closes nothing."""

    def act(parser: ReplyParser) -> None:
        if parser._content.is_blank:
            parser._content.cut()
        else:
            _as_text(parser, closing)

    return act


def _open_reasoning(opening: str, closing: str) -> Action:
    def act(parser: ReplyParser) -> None:
        if parser._content.is_blank:
            parser._content.cut()
            parser._mode = _Reasoning(closing)
        else:
            _as_text(parser, opening)

    return act


def _open(call: CallSyntax) -> Action:
    def act(parser: ReplyParser) -> None:
        if call.at_start and not parser._content.is_blank:
            _as_text(parser, call.opening)
        else:
            parser._mode = _Call(call, call.opening, parser._tools or {})

    return act


def _open_header(opening: str) -> Action:
    def act(parser: ReplyParser) -> None:
        parser._mode = _Header(opening)

    return act


def _recipient(header: Header, words: str) -> str | None:
    """The function that a message with this header calls."""
    match = re.search(header.recipient, words) if header.written else None
    return None if match is None or match[1] in header.others else match[1]


def _body_call(header: Header, name: str) -> CallSyntax:
    """A message whose text is the arguments of a call; without an end, the next one ends it."""
    opening, closings = ("", header.ends) if header.ends else (header.openings[0], header.openings)
    return CallSyntax(opening=opening, closings=closings, body=json_for(name), quotes=True)
