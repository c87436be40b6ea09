"""Messages of content blocks to the conversation that all APIs share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from colibri.server.bodies import Body, Open, convert
from colibri.server.openai.messages import Function, tool_of
from colibri.server.problems import FieldError
from colibri.server.prompts import Conversation

USUAL_EFFORT = "high"
"""Anthropic's default, which its clients also send to models without degrees of reasoning."""


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class SystemBlock(Open):
    """A part of the system message."""

    text: str
    type: Literal["text"]


class Tool(Body):
    """A function on offer."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether to reason, and how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Format(Open):
    """What an answer is held to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class ContextManagement(Open):
    """What may be cleared of a conversation."""

    edits: list[dict[str, Any]] | None = None


class OutputConfig(Body):
    """How much to reason, and what the answer is held to."""

    effort: str | None = None
    format: Format | None = None


def conversation_of(
    turns: Sequence[Turn],
    system: str | list[SystemBlock] | None,
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice | None,
    thinking: ThinkingConfig | None,
    output_config: dict[str, Any] | None,
) -> Conversation:
    """What is asked, in the terms that all APIs share.

    Raises:
        FieldError: a block or a tool is of a kind that is not supported.
    """
    messages: list[dict[str, Any]] = []
    if system:
        text = system if isinstance(system, str) else "\n\n".join(b.text for b in system)
        messages.append({"role": "system", "content": text})
    for index, turn in enumerate(turns):
        messages += _messages_of(turn, f"messages[{index}]")
    config = convert(output_config or {}, OutputConfig, "output_config")
    return Conversation(
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())],
        thinking=_thinking(thinking),
        budget=None if thinking is None else thinking.budget_tokens,
        effort=config.effort,
        usual_effort=USUAL_EFFORT,
        answer=None if config.format is None else {"json_schema": config.format.schema},
        **_choice(tool_choice),
    )


def _thinking(thinking: ThinkingConfig | None) -> bool | None:
    if thinking is None or thinking.type == "adaptive":
        return None
    if thinking.type == "enabled" and (thinking.budget_tokens or 1) < 1:
        raise FieldError("thinking.budget_tokens", "must be at least 1")
    return thinking.type == "enabled"


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    words = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    if (choice.type == "tool") != (choice.name is not None):
        raise FieldError("tool_choice.name", "belongs to type 'tool', which needs it")
    return {
        "tool_choice": words[choice.type],
        "tool_name": choice.name,
        "parallel": not choice.disable_parallel_tool_use,
    }


def _tool(tool: Tool, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise FieldError(f"{place}.type", f"is {tool.type!r}: only custom tools are supported")
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema or None
    )
    return tool_of(function, place)


def _messages_of(turn: Turn, place: str) -> Iterator[dict[str, Any]]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    if turn.role == "assistant":
        yield _assistant(turn.content, place)
        return
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        where = f"{place}.content[{index}]"
        if block.get("type") == "tool_result":
            yield _result(block, where)
        else:
            texts.append(_text(block, where))
    if texts:
        yield {"role": turn.role, "content": "\n\n".join(texts)}


def _text(block: dict[str, Any], place: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind != "text":
        raise FieldError(f"{place}.type", f"is {kind!r}: this model reads text only")
    if not isinstance(text, str):
        raise FieldError(f"{place}.text", "must be a text")
    return text


def _assistant(blocks: Sequence[dict[str, Any]], place: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # what this server writes is never redacted: there is nothing to show
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(_text(block, where))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = made["thinking"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    for key, kind in (("id", str), ("name", str), ("input", dict)):
        if not isinstance(block.get(key), kind):
            raise FieldError(f"{place}.{key}", f"must be there, as {kind.__name__}")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: dict[str, Any], place: str) -> dict[str, Any]:
    id, content = block.get("tool_use_id"), block.get("content", "")
    if not isinstance(id, str):
        raise FieldError(f"{place}.tool_use_id", "must be a text")
    if isinstance(content, list):
        blocks = convert(content, list[dict[str, Any]], f"{place}.content")
        parts = [_text(part, f"{place}.content[{i}]") for i, part in enumerate(blocks)]
        content = "\n".join(parts)
    if not isinstance(content, str | None):
        raise FieldError(f"{place}.content", "must be a text or a list of blocks")
    content = content or ""
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": id, "content": content}
