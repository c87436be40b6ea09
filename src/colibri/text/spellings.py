"""How control tokens are spelled, and the marks that break a spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Linear A: letters that Python prints as they are and no normalization touches.
MARKS = [chr(code) for code in range(0x10600, 0x10637)]
"""The characters one of which, unused by a conversation, marks its untrusted text."""


@dataclass(frozen=True)
class ControlToken:
    """A token that structures a conversation and must not come from a user's text.

    Attributes:
        id: its id.
        text: its spelling.
        special: whether decoding leaves it out.
        lstrip: whether it swallows the blanks before it.
        rstrip: whether it swallows the blanks after it.
    """

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool


Part = tuple[ControlToken | None, str, ControlToken | None]
"""A text between control tokens: (the one before, text, the one after)."""


class Spellings:
    """Finds the spellings of a vocabulary's control tokens in a text, the longest first."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        spellings = sorted(self._tokens, key=len, reverse=True)
        # A single letter cannot be broken by a mark inside it: one behind it counts.
        unmarked = f"(?![{MARKS[0]}-{MARKS[-1]}])"
        parts = [re.escape(s) + (unmarked if len(s) == 1 else "") for s in spellings]
        self._pattern = re.compile("|".join(parts) or "(?!)")
        self._heads = {s[:n] for s in spellings for n in range(1, len(s))}
        self._tails = {s[n:] for s in spellings for n in range(1, len(s))}
        self._longest = max(map(len, spellings), default=0)

    def occur_in(self, text: str) -> bool:
        """Whether any control token is spelled in the text."""
        return self._pattern.search(text) is not None

    def broken(self, text: str, mark: str) -> str:
        """Put a mark behind the first letter of every spelling."""
        pieces, at = [], 0
        while match := self._pattern.search(text, at):
            pieces += [text[at : match.start() + 1], mark]
            at = match.start() + 1  # spellings may overlap
        return "".join(pieces) + text[at:]

    def begins_at_end_of(self, text: str) -> bool:
        """Whether more text could complete a spelling that begins in this one."""
        lengths = range(1, min(self._longest, len(text)) + 1)
        return any(text[-n:] in self._heads for n in lengths)

    def ends_at_start_of(self, text: str) -> bool:
        """Whether this text could complete a spelling that began before it."""
        lengths = range(1, min(self._longest, len(text)) + 1)
        return any(text[:n] in self._tails for n in lengths)

    def split(self, text: str) -> Iterator[Part]:
        """Cut a text at its control tokens."""
        before, at = None, 0
        for match in self._pattern.finditer(text):
            after = self._tokens[match.group()]
            yield before, text[at : match.start()], after
            before, at = after, match.end()
        yield before, text[at:], None
