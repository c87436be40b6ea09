"""Messages, tools and formats as OpenAI's chat spells them, to the conversation all APIs share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from colibri.server.bodies import Body, Open, convert
from colibri.server.problems import FieldError

USUAL_EFFORT = "medium"
"""OpenAI's default, which its clients also send to models without degrees of reasoning."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class FunctionCall(Open):
    """What an assistant called."""

    name: str
    arguments: str = "{}"


class ToolCallPart(Open):
    """A call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    """A function on offer."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool on offer."""

    function: Function
    type: Literal["function"]


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The only tool that may be called."""

    function: NamedFunction
    type: Literal["function"]


class JsonSchema(Body):
    """A format's schema."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer is held to."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def text_of(content: str | Sequence[Mapping[str, Any]] | None, place: str) -> str:
    """The text of a content, whose parts must all be text.

    Raises:
        FieldError: a part is something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(convert(content, list[dict[str, Any]], place)):
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            message = f"is {kind!r}: this model reads text only"
            raise FieldError(f"{place}[{index}].type", message)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise FieldError(f"{place}[{index}].text", "must be a text")
        texts.append(text)
    return "".join(texts)


def message_of(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates take it."""
    place = f"messages[{index}]"
    made: dict[str, Any] = {
        "role": message.role,
        "content": text_of(message.content, f"{place}.content"),
    }
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        made["reasoning_content"] = made["thinking"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    elif message.role == "assistant" and message.content is None and not message.refusal:
        raise FieldError(f"{place}.content", "is missing, and there are no tool_calls either")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise FieldError(f"{place}.tool_call_id", "is missing")
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


def tool_of(function: Function, place: str) -> dict[str, Any]:
    """A tool as chat templates take it."""
    if not _NAME.fullmatch(function.name):
        raise FieldError(f"{place}.name", "holds other than letters, digits, - and _")
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": parameters,
        },
    }


def tool_choice_of(value: Any) -> dict[str, Any]:
    """`tool_choice` in the terms of `Conversation`."""
    if value is None:
        return {}
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise FieldError("tool_choice", f"is {value!r}: auto, none, required or a tool's name")
        return {"tool_choice": value}
    named = convert(value, NamedTool, "tool_choice")
    return {"tool_choice": "required", "tool_name": named.function.name}


def answer_of(
    response_format: ResponseFormat | None, regex: str | None, grammar: str | None
) -> dict[str, Any] | None:
    """What an answer is held to."""
    kinds: list[dict[str, Any]] = []
    if response_format is not None and response_format.type == "json_object":
        kinds.append({"json_object": True})
    elif response_format is not None and response_format.type == "json_schema":
        schema = response_format.json_schema
        if schema is None:
            raise FieldError("response_format.json_schema", "is missing")
        kinds.append({"json_schema": schema.schema or {}})
    kinds += [] if regex is None else [{"regex": regex}]
    kinds += [] if grammar is None else [{"grammar": grammar}]
    if len(kinds) > 1:
        field = "regex" if regex is not None else "grammar"
        raise FieldError(field, "and another format exclude each other")
    return kinds[0] if kinds else None


def thinking_of(effort: str | None, enable: bool | None) -> dict[str, Any]:
    """`reasoning_effort` and `enable_thinking` in the terms of `Conversation`."""
    if effort == "none":
        if enable:
            raise FieldError("reasoning_effort", "is none, but enable_thinking is true")
        return {"thinking": False}
    return {"thinking": enable, "effort": effort, "usual_effort": USUAL_EFFORT}
