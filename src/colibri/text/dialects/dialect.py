"""A syntax of reasoning and tool calls, as a declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from colibri.text.dialects.events import ToolCall
from colibri.text.dialects.readers import CallReader

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of each function on offer, by its name."""

ParseBody: TypeAlias = Callable[[str, Tools], list[ToolCall] | None]
"""Reads what stands between the markers of a call; None where it is none."""


@dataclass(frozen=True, slots=True)
class CallBody:
    """How what stands between the markers of a call is read.

    Attributes:
        parse: all of it.
        reader: makes what reads it while it is being written; None where calls are told whole.
    """

    parse: ParseBody
    reader: Callable[[Tools], CallReader] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Where tool calls stand and how they are spelled.

    Attributes:
        opening: the marker before; it is part of the body where `keeps_opening`.
        closings: any of these ends it; without one, the end of the reply does. Where the opening
            is one of them, it begins the next call too.
        body: what stands between.
        written: how one call is spelled from marker to marker: `$name`, `$json` (all arguments)
            or `$arguments` (each as `argument` says). None where calls cannot be demanded.
        argument: how one argument is spelled, with `$key` and `$value`; where `$value` is its end,
            values are JSON, texts too.
        separator: what stands between two arguments.
        quotes: closings inside of JSON strings do not count.
        at_start: it opens only before any other content.
        keeps_opening: see `opening`.
    """

    opening: str
    closings: tuple[str, ...] = ()
    body: CallBody
    written: str | None = None
    argument: str = ""
    separator: str = ""
    quotes: bool = False
    at_start: bool = False
    keeps_opening: bool = False

    def end(self, text: str, *, at_end: bool = False) -> tuple[int, int] | None:
        """Where the first closing in `text` begins and ends; `at_end`: quotes do not matter."""
        alternatives = [re.escape(closing) for closing in self.closings]
        if not alternatives:
            return None
        if self.quotes and not at_end:
            # A string that is still open reaches to the end of what is there.
            alternatives.insert(0, r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)')
        for match in re.finditer("|".join(alternatives), text, re.DOTALL):
            if match[0] in self.closings:
                return match.span()
        return None


@dataclass(frozen=True, slots=True)
class Header:
    """Messages within a reply that say in a header what they are.

    Attributes:
        openings: markers that begin a header.
        closing: the marker that ends it.
        ends: markers that end a message.
        reasoning: the word in a header that makes the message reasoning; None where none does.
        thinks: how a header of reasoning is spelled, from its opening on.
        written: how a call is spelled, see `CallSyntax`: a message to a function
            (`to=functions.name`) holds its arguments. None where such messages are text.
        recipient: the pattern of a header that names a function.
        others: all other headers that there are, where markers are ordinary text; then a header
            that is none of them and names no function on offer is text.
    """

    openings: tuple[str, ...]
    closing: str
    ends: tuple[str, ...]
    reasoning: str | None
    thinks: str = ""
    written: str | None = None
    recipient: str = r"\bto=(?:functions\.)?([^\s<]+)"
    others: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within a header."""
        return max(map(prompt.rfind, self.openings)) > prompt.rfind(self.closing)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One syntax, start to end.

    Attributes:
        name: of the syntax.
        signature: texts that all stand in the chat template of a model that speaks it.
        reasoning: pairs of markers around reasoning.
        calls: tool calls.
        dropped: markers that are no text and say nothing.
        header: messages with headers.
        answer: what a model writes before its answer where reasoning is done and the answer has a
            header of its own.
        short_ids: templates take ids of tool calls of nine letters and digits only.
    """

    name: str
    signature: tuple[str, ...] = ()
    reasoning: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    calls: tuple[CallSyntax, ...] = ()
    dropped: tuple[str, ...] = ()
    header: Header | None = None
    answer: str = ""
    short_ids: bool = False

    @cached_property
    def markers(self) -> frozenset[str]:
        """Every spelling that structures a reply."""
        found = {marker for pair in self.reasoning for marker in pair} | set(self.dropped)
        for call in self.calls:
            found |= {call.opening, *call.closings, *_spelled(call.written)}
        if self.header is not None:
            found |= {*self.header.openings, self.header.closing, *self.header.ends}
            found |= set(_spelled(self.header.written))
        return frozenset(found)

    @property
    def written(self) -> tuple[str, str] | None:
        """How a call is spelled, and one argument within it; None where none can be demanded."""
        if self.header is not None and self.header.written is not None:
            return self.header.written, ""
        for call in self.calls:
            if call.written is not None:
                return call.written, call.argument
        return None

    @property
    def separator(self) -> str:
        """What stands between two arguments of `written`."""
        return next((call.separator for call in self.calls if call.written is not None), "")

    @property
    def has_calls(self) -> bool:
        """Whether tool calls have a syntax."""
        return bool(self.calls) or (self.header is not None and self.header.written is not None)

    def reasoning_end(self, prompt: str) -> str | None:
        """The marker that ends the reasoning which the end of a rendered prompt has opened."""
        text = prompt.rstrip()
        for opening, closing in self.reasoning:
            if text.endswith(opening.rstrip()):
                return closing
        return None


def _spelled(written: str | None) -> list[str]:
    """The parts of a call's spelling that look like markers."""
    return re.findall(r"<[|\uff5c][^<>]*[|\uff5c]>|\[[A-Z_/]+\]|<\|\"\|>", written or "")
