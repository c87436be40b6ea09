"""Which dialects there are, and which one a chat template speaks."""

from __future__ import annotations

from collections.abc import Iterable

from colibri.errors import TextError
from colibri.text.dialects.bodies import json_calls
from colibri.text.dialects.catalog_json import JSON_DIALECTS, JSON_TAGS
from colibri.text.dialects.catalog_tags import FUNCTION_TAGS, KEY_VALUE_TAGS, TAG_DIALECTS
from colibri.text.dialects.dialect import CallSyntax, Dialect, Tools
from colibri.text.dialects.events import ToolCall


def _any_body(body: str, tools: Tools) -> list[ToolCall] | None:
    """Whatever models write between the commonest markers."""
    for parse in (json_calls, FUNCTION_TAGS.parse, KEY_VALUE_TAGS.parse):
        calls = parse(body, tools)
        if calls is not None:
            return calls
    return None


GENERIC = Dialect(
    name="generic",
    calls=(
        CallSyntax(
            opening=JSON_TAGS.opening,
            closings=JSON_TAGS.closings,
            parse=_any_body,
            written=JSON_TAGS.written,
            quotes=True,
        ),
    ),
)
"""What is understood where a template shows no syntax: thinking and tool calls in usual tags."""

DIALECTS: tuple[Dialect, ...] = (*TAG_DIALECTS, *JSON_DIALECTS, GENERIC)


def find_dialect(templates: Iterable[str], name: str | None = None) -> Dialect:
    """The dialect that chat templates show, else the one of that name, else the generic one.

    Raises:
        TextError: no dialect has the name.
    """
    text = "\n".join(templates)
    for dialect in DIALECTS:
        if dialect.signature and all(part in text for part in dialect.signature):
            return dialect
    if name is None:
        return GENERIC
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise TextError(f"dialect {name!r} is not known: known are {[d.name for d in DIALECTS]}")
