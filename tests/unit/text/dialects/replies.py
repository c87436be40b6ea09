"""Replies in every dialect, spelled as the dialect says they are."""

import json
import random
from dataclasses import replace
from typing import Any

from colibri.text.dialects import (
    DIALECTS,
    CallArguments,
    CallBegun,
    Channel,
    Dialect,
    Event,
    ReplyParser,
    TextDelta,
)
from colibri.text.dialects.events import ToolCall

ARGUMENTS: dict[str, Any] = {"city": "Pàris 🦜", "days": 3}
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "noon": {"type": "object", "properties": {}},
}
CALLING = [dialect for dialect in DIALECTS if dialect.written is not None]
THINKING = [dialect for dialect in DIALECTS if dialect.reasoning]


def spelled_call(dialect: Dialect, name: str, arguments: dict[str, Any]) -> str:
    """A call as the dialect writes it."""
    assert dialect.written is not None
    written, argument = dialect.written
    parts = []
    for key, value in arguments.items():
        is_plain = isinstance(value, str) and not argument.endswith("$value")
        text = value if is_plain else json.dumps(value, ensure_ascii=False)
        kind = "string" if isinstance(value, str) else "number"
        is_text = str(kind == "string").lower()
        part = argument.replace("$key", key).replace("$type", kind).replace("$string", is_text)
        parts.append(part.replace("$value", text))
    spelled = dialect.separator.join(parts)
    written = written.replace("$name", name).replace("$arguments", spelled)
    return written.replace("$json", json.dumps(arguments, ensure_ascii=False))


def opened(dialect: Dialect) -> str:
    """How a prompt ends, where the reply goes on in a header."""
    header = dialect.header
    return "" if header is None else header.openings[0] + "assistant" * len(header.ends[:1])


def parsed(
    dialect: Dialect, pieces: list[str], *, tools: Any = TOOLS, prompt: str = ""
) -> tuple[str, str, list[ToolCall]]:
    """Content, reasoning and calls of a reply that arrives in pieces."""
    parser = ReplyParser(dialect, tools, prompt=prompt)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish()
    return joined(events)


def joined(events: list[Event]) -> tuple[str, str, list[ToolCall]]:
    texts = {
        channel: "".join(
            e.text for e in events if isinstance(e, TextDelta) and e.channel is channel
        )
        for channel in Channel
    }
    calls: list[ToolCall] = []
    for before, event in zip([None, *events], events, strict=False):
        if isinstance(event, CallBegun):
            calls.append(ToolCall(event.name, "", event.id))
        elif isinstance(event, CallArguments):
            assert isinstance(before, CallBegun | CallArguments)  # they follow one another
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.text)
    return texts[Channel.CONTENT], texts[Channel.REASONING], calls


def cut(text: str, seed: int) -> list[str]:
    """The text in random pieces, single letters among them."""
    draw = random.Random(seed)
    pieces = []
    while text:
        n = draw.choice([1, 1, 2, 3, 7, 20])
        pieces.append(text[:n])
        text = text[n:]
    return pieces
