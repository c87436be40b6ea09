"""What a reply consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
class CallBegun:
    """A tool call begins; its arguments follow, up to the next event of another kind.

    Attributes:
        name: of the function.
        id: as the model wrote it, where its syntax has one and it comes before the arguments.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the text of the last call's arguments; never empty.

    Joined it is a JSON object, unless the model broke it off or wrote something else.
    """

    text: str


CallEvent: TypeAlias = CallBegun | CallArguments
Event: TypeAlias = TextDelta | CallEvent


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


def told_whole(calls: Iterable[ToolCall]) -> Iterator[CallEvent]:
    """The events of calls that are known to their ends."""
    for call in calls:
        yield CallBegun(call.name, call.id)
        yield CallArguments(call.arguments)
