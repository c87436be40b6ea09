"""Which dialects there are, and which one a chat template speaks."""

from __future__ import annotations

from collections.abc import Iterable

from colibri.errors import TextError
from colibri.text.dialects.bodies import JSON_BODY
from colibri.text.dialects.catalog_json import JSON_DIALECTS, JSON_TAGS
from colibri.text.dialects.catalog_tags import FUNCTION_TAGS, KEY_VALUE_TAGS, TAG_DIALECTS
from colibri.text.dialects.dialect import CallBody, CallSyntax, Dialect, Tools
from colibri.text.dialects.events import ToolCall
from colibri.text.dialects.readers import ByFirstLetter, CallReader

_TAGS = {"{": JSON_BODY, "[": JSON_BODY, "<": FUNCTION_TAGS.body}
"""By their first letter, what models write between the commonest markers."""


def _body_of(letter: str) -> CallBody:
    return _TAGS.get(letter, KEY_VALUE_TAGS.body)


def _any_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    return _body_of(body.strip()[:1]).parse(body, tools)


def _any_reader(tools: Tools) -> CallReader:
    def choose(letter: str) -> CallReader:
        make = _body_of(letter).reader
        assert make is not None  # all of these are told as they come
        return make(tools)

    return ByFirstLetter(choose)


GENERIC = Dialect(
    name="generic",
    calls=(
        CallSyntax(
            opening=JSON_TAGS.opening,
            closings=JSON_TAGS.closings,
            body=CallBody(_any_calls, _any_reader),
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
