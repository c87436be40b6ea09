"""Dialects: how replies spell reasoning and tool calls, and a parser for all of them."""

from colibri.text.dialects.catalog import DIALECTS, find_dialect
from colibri.text.dialects.dialect import Dialect
from colibri.text.dialects.events import CallArguments, CallBegun, Channel, Event, TextDelta
from colibri.text.dialects.parser import ReplyParser
from colibri.text.dialects.partial_json import object_of

__all__ = [
    "DIALECTS",
    "CallArguments",
    "CallBegun",
    "Channel",
    "Dialect",
    "Event",
    "ReplyParser",
    "TextDelta",
    "find_dialect",
    "object_of",
]
