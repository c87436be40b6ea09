"""What a reply consists of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Channel(StrEnum):
    """Where a text belongs."""

    CONTENT = "content"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of a channel; never empty."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
        id: as the model wrote it, where its syntax has one.
    """

    name: str
    arguments: str
    id: str | None = None


Event: TypeAlias = TextDelta | ToolCall
