"""`input` items of `/v1/responses` to the conversation that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from colibri.server.bodies import Body, Open, convert
from colibri.server.openai.messages import text_of
from colibri.server.problems import FieldError


class FunctionTool(Body):
    """A function on offer."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The only function that may be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What an answer is held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """`text` of a request."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None

    def answer(self) -> dict[str, Any] | None:
        """What the answer is held to."""
        if self.format is None or self.format.type == "text":
            return None
        if self.format.type == "json_object":
            return {"json_object": True}
        return {"json_schema": self.format.schema or {}}


class Item(Open):
    """A message in `input`."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


def messages_of(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Raises:
        FieldError: an item is of a kind that is not supported.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            message = convert(item, Item, place)
            text = text_of(message.content, f"{place}.content")
            if message.role == "assistant":
                turn = _assistant(messages)
                turn["content"] += text
            else:
                messages.append({"role": message.role, "content": text})
        case "function_call":
            function = {"name": _text(item, "name", place), "arguments": item.get("arguments")}
            id = _text(item, "call_id", place)
            call = {"id": id, "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = text_of(item.get("output"), f"{place}.output")
            id = _text(item, "call_id", place)
            messages.append({"role": "tool", "tool_call_id": id, "content": output})
        case "reasoning":
            key = "content" if item.get("content") else "summary"
            parts = convert(item.get(key) or [], list[dict[str, Any]], f"{place}.{key}")
            thought = "".join(str(part.get("text", "")) for part in parts)
            turn = {"role": "assistant", "content": ""}
            if thought:
                turn["reasoning_content"] = turn["thinking"] = thought
            messages.append(turn)
        case kind:
            raise FieldError(f"{place}.type", f"is {kind!r}, which is not supported")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that the last item belongs to: several items are one turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(item: dict[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise FieldError(f"{place}.{key}", "must be a text")
    return value
