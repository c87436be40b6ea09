"""Dialects: how replies spell reasoning and tool calls, and a parser for all of them."""

from colibri.text.dialects.catalog import DIALECTS, find_dialect
from colibri.text.dialects.dialect import Dialect
from colibri.text.dialects.events import Channel, Event, TextDelta, ToolCall
from colibri.text.dialects.parser import ReplyParser

__all__ = [
    "DIALECTS",
    "Channel",
    "Dialect",
    "Event",
    "ReplyParser",
    "TextDelta",
    "ToolCall",
    "find_dialect",
]
