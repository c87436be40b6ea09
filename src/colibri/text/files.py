"""Which files describe a checkpoint's tokenizer, and what they say besides the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.errors import TextError

# Vocabularies in formats that have no reader here: named, so that their absence is never silent.
_UNREAD = ("tiktoken.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or nothing where there is no such file.

    Raises:
        TextError: the file is unreadable, no JSON, or not an object; the message names it.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"{path} cannot be read ({error}): download this file again") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} holds a {type(value).__name__} where a JSON object is wanted")
    return value


def find_vocabulary(directory: Path) -> Path | None:
    """Return tokenizer.json, else tokenizer.model, else None.

    Raises:
        TextError: there is a vocabulary, but only in a format that is not read.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        if (directory / name).is_file():
            return directory / name
    unread = [directory / name for name in _UNREAD if (directory / name).is_file()]
    for path in unread + sorted(directory.glob("*.tiktoken")):
        raise TextError(f"{path} is in a format that is not read: put the tokenizer.json beside it")
    return None


@dataclass(frozen=True)
class ExtraToken:
    """A token that a side file adds to the vocabulary, or asserts to be there."""

    id: int
    text: str
    special: bool
    normalized: bool
    lstrip: bool
    rstrip: bool
    path: Path


@dataclass(frozen=True)
class SideFiles:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json, any of them absent."""

    directory: Path
    config: Mapping[str, Any]
    special_map: Mapping[str, Any]
    added: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> SideFiles:
        """Read what is there.

        Raises:
            TextError: a file is there but broken.
        """
        return cls(
            directory,
            read_json(directory / "tokenizer_config.json"),
            read_json(directory / "special_tokens_map.json"),
            read_json(directory / "added_tokens.json"),
        )

    def named(self, name: str) -> str | None:
        """Return the spelling of `bos_token`, `eos_token`, …; the config wins over the map."""
        return _spelling(self.config.get(name)) or _spelling(self.special_map.get(name))

    def special_tokens(self) -> dict[str, str]:
        """Every named special token: what chat templates may use as variables."""
        return {name: text for name in _NAMED if (text := self.named(name)) is not None}

    def flag(self, name: str) -> bool | None:
        """Return a switch of the config such as `add_bos_token`; None where it is not stated.

        Raises:
            TextError: the key is there with another type.
        """
        value = self.config.get(name)
        if value is None or isinstance(value, bool):
            return value
        path = self.directory / "tokenizer_config.json"
        raise TextError(f"{path}: {name} is {value!r} where true or false is wanted")

    def extra_tokens(self) -> Iterator[ExtraToken]:
        """Yield the tokens of `added_tokens_decoder` and added_tokens.json, ids ascending.

        Raises:
            TextError: an entry is malformed.
        """
        path = self.directory / "tokenizer_config.json"
        decoder = self.config.get("added_tokens_decoder") or {}
        tokens = [_configured(path, key, entry) for key, entry in _items(path, decoder)]
        seen = {token.text for token in tokens}
        plain = self.directory / "added_tokens.json"
        for text, number in self.added.items():
            if text not in seen:
                token_id = _integer(plain, text, number)
                tokens.append(ExtraToken(token_id, text, False, True, False, False, plain))
        yield from sorted(tokens, key=lambda token: token.id)


def _spelling(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _items(path: Path, decoder: object) -> list[tuple[str, object]]:
    if not isinstance(decoder, dict):
        raise TextError(f"{path}: added_tokens_decoder must map ids to tokens")
    return list(decoder.items())


def _configured(path: Path, key: str, entry: object) -> ExtraToken:
    text = _spelling(entry)
    if not isinstance(entry, dict) or text is None:
        raise TextError(f"{path}: added_tokens_decoder[{key!r}] has no content")
    special = entry.get("special") is True
    return ExtraToken(
        _integer(path, text, key),
        text,
        special,
        entry.get("normalized", not special) is True,
        entry.get("lstrip") is True,
        entry.get("rstrip") is True,
        path,
    )


def _integer(path: Path, text: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise TextError(f"{path}: the id of token {text!r} is {value!r}, not a number >= 0")
