"""Stop strings in a stream of text, whatever the pieces it arrives in."""

from __future__ import annotations

from collections.abc import Sequence

from colibri.errors import RequestError

MAX_STOP_STRINGS = 4
"""How many stop strings OpenAI-like requests may carry."""


class StopStrings:
    """Finds the first stop string and holds back what could be the beginning of one.

    The stop string completed first wins; of several completed by the same character the longest,
    so that the result does not depend on how the text was cut, and nothing waits for a longer one.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: str | Sequence[str] | None, *, limit: int | None = None) -> None:
        """Take one string, several or none.

        Raises:
            RequestError: a stop string is empty or no string, or there are more than `limit`.
        """
        given = [stops] if isinstance(stops, str) else list(stops or ())
        for index, stop in enumerate(given):
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop[{index}] is {stop!r}: a non-empty string is wanted")
        if limit is not None and len(given) > limit:
            raise RequestError(f"stop holds {len(given)} strings, at most {limit} are allowed")
        self._stops = tuple(dict.fromkeys(given))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; return what may be shown and whether a stop string was found.

        After a stop string was found nothing more is shown.
        """
        if self.matched is not None:
            return "", True
        text = self._held + text
        start = self._find(text)
        if start is None:
            start = len(text) - self._pending(text)
        self._held = "" if self.matched is not None else text[start:]
        return text[:start], self.matched is not None

    def finish(self) -> str:
        """Return what was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        hits = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if not hits:
            return None
        _, start, self.matched = min(hits)
        return start

    def _pending(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
