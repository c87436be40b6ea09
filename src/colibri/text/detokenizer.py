"""Token ids to text, one at a time: what was pushed so far is always a prefix of the whole text."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenSource(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text."""

    @property
    def strips_first_blank(self) -> bool:
        """Whether the text as a whole loses one leading blank."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""


class Detokenizer:
    """Turns ids into text without ever decoding the same id twice.

    The concatenation of every `push` and one `finish` equals `Tokenizer.decode` of all ids. Bytes
    that may still become a character are held back; invalid ones become U+FFFD, one for each
    maximal invalid part (Unicode 15, section 3.9).
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """`keep`: special ids that are spelled out although others are skipped."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - keep if skip_special else frozenset()
        self._strips_blank = tokenizer.strips_first_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the complete characters that this id finishes, possibly none.

        Raises:
            RequestError: the id is negative.
        """
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if self._strips_blank and data:
            data = data.removeprefix(b" ")
            self._strips_blank = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return U+FFFD for a character that was begun and never finished, else nothing."""
        return self._decoder.decode(b"", final=True)
