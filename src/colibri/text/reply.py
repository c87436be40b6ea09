"""From the token ids of a reply to what it consists of: content, reasoning and tool calls."""

from __future__ import annotations

from colibri.text.detokenizer import Detokenizer
from colibri.text.dialects.dialect import Dialect, Tools
from colibri.text.dialects.events import Channel, Event, TextDelta
from colibri.text.dialects.parser import ReplyParser
from colibri.text.stop import StopStrings
from colibri.text.tokenizer import Tokenizer


class ReplyReader:
    """Reads one reply, up to the first stop string in its content.

    Stop strings are not looked for in reasoning and in tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: Dialect | None = None,
        *,
        tools: Tools | None = None,
        prompt: str = "",
        stop: tuple[str, ...] = (),
    ) -> None:
        """Begin a reply.

        Args:
            tokenizer: the checkpoint's.
            dialect: how replies are spelled; None for plain text, all of it content.
            tools: argument schemas by function; None where calls are not looked for.
            prompt: how the rendered prompt ends.
            stop: stop strings.
        """
        self._parser: ReplyParser | None = None
        keep = frozenset[int]()
        if dialect is not None:
            self._parser = ReplyParser(dialect, tools, prompt=prompt)
            keep = tokenizer.ids_within(dialect.markers)
        self._detokenizer = Detokenizer(tokenizer, keep=keep)
        self._stops = StopStrings(stop)

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    @property
    def is_content(self) -> bool:
        """Whether what comes next is content, as far as is known."""
        return self._parser is None or self._parser.is_content

    def push(self, token: int) -> list[Event]:
        """Events that a token makes certain; none after a stop string was found."""
        if self.matched is not None:
            return []
        return self._cut(self._parsed(self._detokenizer.push(token)))

    def finish(self) -> list[Event]:
        """What was held back, once the reply has ended."""
        if self.matched is not None:
            return []
        events = self._parsed(self._detokenizer.finish())
        events += [] if self._parser is None else self._parser.finish()
        return self._cut(events) + _content(self._stops.finish())

    def _parsed(self, text: str) -> list[Event]:
        return _content(text) if self._parser is None else self._parser.push(text)

    def _cut(self, events: list[Event]) -> list[Event]:
        """The events before the first stop string."""
        shown: list[Event] = []
        for event in events:
            if self.matched is not None:
                break
            if isinstance(event, TextDelta) and event.channel is Channel.CONTENT:
                shown += _content(self._stops.push(event.text)[0])
            else:
                shown += [*_content(self._stops.finish()), event]
        return shown


def _content(text: str) -> list[Event]:
    return [TextDelta(Channel.CONTENT, text)] if text else []
