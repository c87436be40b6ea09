"""The bytes that a token stands for, read from the decoder that tokenizer.json declares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from colibri.errors import TextError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_letters() -> dict[str, int]:
    """Map the 256 letters of byte-level BPE to bytes.

    Printable Latin-1 letters stand for themselves, the other bytes for U+0100 onwards in order
    (the table GPT-2 published).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _byte_letters()


@dataclass(frozen=True)
class TokenBytes:
    """How token spellings become bytes.

    Attributes:
        kind: `byte_level` (every letter is a byte) or `pieces` (text, `replacements` undone, with
            `<0x0A>` for single bytes).
        replacements: pairs of (letter, text) for `pieces`, usually `▁` and a blank.
        strips_first_blank: the text as a whole loses one leading blank, which encoding had added.
    """

    kind: Literal["byte_level", "pieces"]
    replacements: tuple[tuple[str, str], ...] = ()
    strips_first_blank: bool = False

    @classmethod
    def of_decoder(cls, decoder: Mapping[str, Any] | None, where: str) -> TokenBytes:
        """Understand the `decoder` of a tokenizer.json.

        Raises:
            TextError: a decoder that is not known; `where` names the file in the message.
        """
        steps = _steps(decoder)
        names = [str(step.get("type")) for step in steps]
        if names == ["ByteLevel"]:
            return cls("byte_level")
        if not names or not set(names) <= _PIECEWISE:
            raise TextError(f"{where}: decoder {names or None} is not supported")
        replacements = tuple(pair for step in steps for pair in _replacements(step, where))
        return cls("pieces", replacements, any(_strips(step) for step in steps))

    def __call__(self, token: str) -> bytes:
        """Return the bytes of one token as the vocabulary spells it."""
        if self.kind == "byte_level":
            try:
                return bytes([_LETTERS[letter] for letter in token])
            except KeyError:
                return token.encode()  # an added token: its spelling is its text
        for letter, text in self.replacements:
            token = token.replace(letter, text)
        match = _BYTE_PIECE.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode()


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _replacements(step: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] != "Replace":
        return []
    pattern = step["pattern"].get("String")
    if not pattern:
        raise TextError(f"{where}: decoder Replace with pattern {step['pattern']} is not supported")
    return [(pattern, step["content"])]


def _strips(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
