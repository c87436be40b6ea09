"""Calls that are still being written: the name as soon as it is known, then arguments as they come.

A reader takes the text between the markers of a call piece by piece. What it tells depends on the
text alone, not on how it was cut. It commits itself when name and beginning of the arguments are
there; before, nothing is told, and whoever reads the whole text may find that it is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from colibri.text.dialects.events import CallArguments, CallBegun, CallEvent

NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id")

_STRING = r'"(?:[^"\\]|\\.)*"'
_BETWEEN = re.compile(r"[\s,;\[\]]*")
_KEY = re.compile(rf"[\s,]*({_STRING})\s*:\s*(?=\S)", re.DOTALL)
_END = re.compile(r"[\s,]*\}")
_TEXT = re.compile(_STRING, re.DOTALL)
_WORD = re.compile(r"[-+.\w]+(?=[\s,}\]])")
_PUNCTUATION = " \t\n\r{}[],;`"


ArgumentOf = Callable[[str, Mapping[str, Any]], tuple[str, bool, Callable[[str], Any]]]


class CallReader(Protocol):
    """Reads the text of calls."""

    @property
    def num_calls(self) -> int:
        """Calls that were told."""

    @property
    def rest(self) -> str:
        """What was not told, of the text so far."""

    def push(self, text: str) -> list[CallEvent]:
        """More of the text; what it makes certain."""

    def finish(self) -> list[CallEvent]:
        """The text has ended; what was held back."""


class _Reader:
    """Takes steps as long as there is text for them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.rest = ""
        self._out: list[CallEvent] = []
        self._step: Callable[[], bool] = self._stop

    def push(self, text: str) -> list[CallEvent]:
        """See `CallReader`."""
        self.rest += text
        while self._step():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[CallEvent]:
        """See `CallReader`."""
        return []

    def _stop(self) -> bool:
        """Nothing more is told."""
        return False

    def _give_up(self) -> bool:
        self._step = self._stop
        return False

    def _take(self, end: int) -> str:
        taken, self.rest = self.rest[:end], self.rest[end:]
        return taken

    def _begin(self, name: str, id: str | None = None) -> None:
        self.num_calls += 1
        self._out.append(CallBegun(name, id))

    def _tell(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(text))


class _Balanced:
    """Follows brackets and strings to the end of a JSON object, whatever is in it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """How much of more text belongs to the object, where it ends there."""
        for index, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or letter != '"'
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


class _RawObjects(_Reader):
    """Tells a JSON object as it was written."""

    def __init__(self) -> None:
        super().__init__()
        self._balanced = _Balanced()

    def _begin_object(self, name: str, id: str | None) -> bool:
        """The rest begins with the object."""
        self._begin(name, id)
        self._balanced, self._step = _Balanced(), self._object
        return True

    def _object(self) -> bool:
        if not self.rest:
            return False
        end = self._balanced.end(self.rest)
        self._tell(self._take(len(self.rest) if end is None else end))
        if end is not None:
            self._step = self._after_object
        return end is not None

    def _after_object(self) -> bool:
        return self._give_up()


class JsonReader(_RawObjects):
    """`{"name": …, "arguments": {…}}`, a list of them, or several one after another.

    Calls whose arguments come before their name, or within other objects, are not told.
    """

    def __init__(self, tools: object = None) -> None:
        super().__init__()
        self._name: str | None = None
        self._id: str | None = None
        self._is_told = False
        self._step = self._between

    def _between(self) -> bool:
        match = _BETWEEN.match(self.rest)
        self._take(match.end() if match and self.num_calls else 0)
        at = match.end() if match and not self.num_calls else 0
        if at >= len(self.rest):
            return False
        if self.rest[at] != "{":
            return self._give_up()
        self._take(at + 1)
        self._name = self._id = None
        self._is_told = False
        self._step = self._pair
        return True

    def _pair(self) -> bool:
        """One more key of a call, or its end."""
        end = _END.match(self.rest)
        if end is not None:
            self._take(end.end())
            self._step = self._between
            return self._is_told or self._give_up()
        key = _KEY.match(self.rest)
        if key is None:
            return False
        at = key.end()
        if self.rest[at] == "{":
            if self._name and _word(key[1]) in ARGUMENTS and not self._is_told:
                self._take(at)
                self._is_told = True
                return self._begin_object(self._name, self._id)
            return self._give_up()
        value = (_TEXT if self.rest[at] == '"' else _WORD).match(self.rest, at)
        if value is not None:
            self._note(_word(key[1]), _word(value[0]))
            self._take(value.end())
        return value is not None

    def _note(self, key: str | None, value: str | None) -> None:
        if key in NAMES and self._name is None:
            self._name = value
        elif key in IDS and self._id is None:
            self._id = value

    def _after_object(self) -> bool:
        self._step = self._pair
        return True


def _word(text: str) -> str | None:
    """What a JSON string says; None for other values."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class NamedReader(_RawObjects):
    """A name, spelled as `head` says, and one JSON object."""

    def __init__(self, head: re.Pattern[str], name: str | None = None) -> None:
        """`name` is the function's where the head has no group `name`."""
        super().__init__()
        self._head, self._name = head, name
        self._step = self._heading

    def _heading(self) -> bool:
        match = self._head.match(self.rest)
        if match is None:
            return False
        groups = match.groupdict()
        self._take(match.end())
        return self._begin_object(self._name or groups["name"].strip(), groups.get("id"))


class TaggedReader(_Reader):
    """Calls whose arguments stand each between tags of its own; texts are told as they come."""

    def __init__(
        self,
        call: re.Pattern[str],
        argument: re.Pattern[str],
        ends: Sequence[str],
        call_end: re.Pattern[str] | None,
        argument_of: ArgumentOf,
        ahead: int,
    ) -> None:
        """Args as follow.

        Args:
            call: what stands before the first argument of a call, with group `name`.
            argument: what stands before the value of an argument.
            ends: what stands behind it, the longest first.
            call_end: what stands behind the last argument; None where the text ends there.
            argument_of: from the function's name and the groups of `argument`: the key, whether
                the value is text, and what makes a value of a text that is none.
            ahead: letters of a value that must be there, or more may belong to `argument`.
        """
        super().__init__()
        self._call, self._argument, self._call_end = call, argument, call_end
        self._ends, self._argument_of, self._ahead = tuple(ends), argument_of, ahead
        self._end = re.compile("|".join(map(re.escape, ends)))
        self._name, self._num_arguments = "", 0
        self._value_of: Callable[[str], Any] = str
        self._step = self._heading

    def _heading(self) -> bool:
        """A call counts when its first argument begins."""
        call = self._call.match(self.rest)
        first = None if call is None else self._begun(call.end())
        if call is None or first is None:
            return False
        self._name, self._num_arguments = call["name"].strip(), 0
        if not self._name:
            return self._give_up()
        self._begin(self._name)
        return self._begin_argument(first)

    def _begun(self, at: int) -> re.Match[str] | None:
        """The beginning of an argument, once what follows it has come too."""
        found = self._argument.match(self.rest, at)
        enough = found is not None and len(self.rest) - found.end() >= self._ahead
        return found if enough else None

    def _begin_argument(self, found: re.Match[str]) -> bool:
        key, is_text, self._value_of = self._argument_of(self._name, found.groupdict())
        before = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        self._tell(f"{before}{_dumped(key)}: " + ('"' if is_text else ""))
        self._take(found.end())
        self._step = self._text if is_text else self._value
        return True

    def _text(self) -> bool:
        found = self._end.search(self.rest)
        keep = 0 if found else pending(self.rest, self._ends)
        text = self._take(found.start() if found else len(self.rest) - keep)
        self._tell(_dumped(text)[1:-1])
        if found is None:
            return False
        self._tell('"')
        self._take(len(found[0]))
        self._step = self._next
        return True

    def _value(self) -> bool:
        found = self._end.search(self.rest)
        if found is None:
            return False
        text = self._take(found.start())
        self._tell(_dumped(self._value_of(text)))
        self._take(len(found[0]))
        self._step = self._next
        return True

    def _next(self) -> bool:
        """The next argument, or the end of the call."""
        following = self._begun(0)
        if following is not None:
            return self._begin_argument(following)
        end = None if self._call_end is None else self._call_end.match(self.rest)
        if end is None:
            return False
        self._take(end.end())
        self._tell("}")
        self._step = self._heading
        return True

    def finish(self) -> list[CallEvent]:
        """See `CallReader`; a call that nothing else ends is ended."""
        if self._step == self._text:
            self._tell(_dumped(self._take(len(self.rest)))[1:-1])
        elif self._step == self._value:
            self._tell(self._take(len(self.rest)))
        elif self._step == self._next and self._call_end is None and not self.rest.strip():
            self._tell("}")
        self._step = self._stop
        return self.push("")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class ByFirstLetter:
    """A reader that the first letter of the text chooses."""

    def __init__(self, choose: Callable[[str], CallReader]) -> None:
        self._choose = choose
        self._chosen: CallReader | None = None
        self._before = ""

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return 0 if self._chosen is None else self._chosen.num_calls

    @property
    def rest(self) -> str:
        """See `CallReader`."""
        return self._before if self._chosen is None else self._chosen.rest

    def push(self, text: str) -> list[CallEvent]:
        """See `CallReader`."""
        if self._chosen is None:
            self._before += text
            text = self._before
            if not text.strip():
                return []
            self._chosen = self._choose(text.lstrip()[0])
        return self._chosen.push(text)

    def finish(self) -> list[CallEvent]:
        """See `CallReader`."""
        return [] if self._chosen is None else self._chosen.finish()


def leftover(rest: str) -> str:
    """What is said behind a call that is no part of it; empty where that is punctuation."""
    return rest if rest.strip(_PUNCTUATION) else ""


def pending(text: str, markers: Sequence[str]) -> int:
    """How much of the end of a text may be the beginning of a marker."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
