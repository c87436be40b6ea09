"""What stands between the markers of a tool call: JSON, a name and JSON, or tagged arguments.

Each function makes a parser of one spelling. Parsers never raise: what is no call is None, and the
caller shows it as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from colibri.text.dialects.dialect import CallBody, Tools
from colibri.text.dialects.events import ToolCall
from colibri.text.dialects.readers import (
    ARGUMENTS,
    IDS,
    NAMES,
    JsonReader,
    NamedReader,
    TaggedReader,
)


def _json_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`{"name": …, "arguments": {…}}`, a list of them, or several one after another.

    `tool_name`, `parameters` and an `id` are known too, and `{"the_name": {…}}`.
    """
    values = _json_values(body)
    if values is None:
        return None
    listed = [item for v in values for item in (v if isinstance(v, list) else [v])]
    calls = [_call_of(item) for item in listed]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call_of(value: object) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id")}
    name = next((value[key] for key in NAMES if isinstance(value.get(key), str)), None)
    if name is None and len(value) == 1:
        name, arguments = next(iter(value.items()))
    else:
        arguments = next((value[key] for key in ARGUMENTS if key in value), {})
    written = next((value[key] for key in IDS if isinstance(value.get(key), str)), None)
    return None if not name else made_call(name, arguments, written)


def made_call(name: str, arguments: object, id: str | None = None) -> ToolCall | None:
    """A call whose arguments are an object, or text that is one; None otherwise."""
    if isinstance(arguments, str):
        values = _json_values(arguments) if arguments.strip() else [{}]
        arguments = values[0] if values is not None and len(values) == 1 else None
    if arguments is None or not isinstance(arguments, dict) or not name:
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), id)


JSON_BODY = CallBody(_json_calls, JsonReader)
"""`{"name": …, "arguments": {…}}`, a list of them, or several one after another."""


def named_json(head: str, tail: str = "") -> CallBody:
    """One call: a name, spelled as `head` says, an object of arguments, and perhaps `tail`.

    `head` is a pattern with a group `name`, and perhaps `id`.
    """
    whole = re.compile(rf"{head}(?P<json>.*?){tail}", re.DOTALL)
    beginning = re.compile(rf"\s*{head}\s*(?=\{{)", re.DOTALL)

    def parse(body: str, tools: Tools) -> list[ToolCall] | None:
        match = whole.fullmatch(body.strip())
        if match is None:
            return None
        groups = match.groupdict()
        call = made_call(groups["name"].strip(), groups["json"], groups.get("id"))
        return None if call is None else [call]

    return CallBody(parse, lambda _tools: NamedReader(beginning))


def json_for(name: str) -> CallBody:
    """The arguments of a call of a function that is known."""

    def parse(body: str, tools: Tools) -> list[ToolCall] | None:
        call = made_call(name, body)
        return None if call is None else [call]

    beginning = re.compile(r"\s*(?=\{)")
    return CallBody(parse, lambda _tools: NamedReader(beginning, name))


def tagged_arguments(
    call: str, argument: str, ends: Sequence[str], *, call_end: str | None = None, ahead: int = 1
) -> CallBody:
    """Calls whose arguments stand each between tags of its own.

    Args:
        call: pattern of what stands before the arguments, with a group `name`.
        argument: pattern of what stands before a value, with a group `key`, perhaps `type`
            (`string` or another) or `string` (`true` or `false`). Without them the function's
            schema says what is a string; what it does not say is JSON where it can be read as such.
        ends: what stands behind a value, the longest first.
        call_end: what stands behind the arguments; by default they go on to the end.
        ahead: see `TaggedReader`.
    """
    tail = "|".join(map(re.escape, ends))
    closing = "" if call_end is None else re.escape(call_end)
    body = r"(?P<body>.*)" if call_end is None else r"(?P<body>.*?)"
    calls = re.compile(call + body + closing, re.DOTALL)
    arguments = re.compile(rf"{argument}(?P<value>.*?)(?:{tail})", re.DOTALL)

    def parse(body: str, tools: Tools) -> list[ToolCall] | None:
        found: list[ToolCall] = []
        at = 0
        for match in calls.finditer(body):
            if body[at : match.start()].strip():
                return None
            at = match.end()
            name = match["name"].strip()
            values = _argument_values(arguments, match["body"] or "", tools.get(name, {}))
            if values is None or not name:
                return None
            found.append(ToolCall(name, json.dumps(values, ensure_ascii=False)))
        return found if found and not body[at:].strip() else None

    def reader(tools: Tools) -> TaggedReader:
        def argument_of(
            name: str, groups: Mapping[str, Any]
        ) -> tuple[str, bool, Callable[[str], Any]]:
            key = groups["key"].strip()
            schema, stated = _property(tools.get(name, {}), key), _stated_text(groups)
            return key, is_text(schema, stated), lambda text: typed_value(text, schema, stated)

        return TaggedReader(
            re.compile(rf"\s*{call}", re.DOTALL),
            re.compile(rf"\s*{argument}", re.DOTALL),
            ends,
            None if call_end is None else re.compile(rf"\s*{closing}"),
            argument_of,
            ahead,
        )

    return CallBody(parse, reader)


def _argument_values(
    pattern: re.Pattern[str], body: str, schema: Mapping[str, Any]
) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    at = 0
    for match in pattern.finditer(body):
        if body[at : match.start()].strip():
            return None
        at = match.end()
        groups = match.groupdict()
        key, text = groups["key"].strip(), groups["value"]
        is_text = _stated_text(groups)
        values[key] = typed_value(text, _property(schema, key), is_text)
    return None if body[at:].strip() else values


def _stated_text(groups: Mapping[str, str | None]) -> bool | None:
    """Whether a value is text, where the spelling says so."""
    if groups.get("string") is not None:
        return groups["string"] == "true"
    return None if groups.get("type") is None else groups["type"] == "string"


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(schema: Mapping[str, Any], stated: bool | None = None) -> bool:
    """Whether a value is text, as its spelling states or else its schema says."""
    if stated is not None:
        return stated
    return schema.get("type") == "string" or any(
        isinstance(value, str) for value in schema.get("enum", ())
    )


def typed_value(text: str, schema: Mapping[str, Any], stated: bool | None = None) -> Any:
    """The value that an argument's text stands for."""
    values = None if is_text(schema, stated) else _json_values(text)
    if values is not None and len(values) == 1:
        return values[0]
    return text


def _json_values(text: str) -> list[Any] | None:
    """JSON values one after another, with blanks, commas or semicolons between them."""
    try:
        return list(_decoded(text.strip()))
    except (ValueError, RecursionError):
        return None


def _decoded(text: str) -> Iterator[Any]:
    at = 0
    while at < len(text):
        value, end = _DECODER.raw_decode(text, at)
        yield value
        at = re.compile(r"[\s,;]*").match(text, end).end()  # type: ignore[union-attr]  # (it is optional)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
