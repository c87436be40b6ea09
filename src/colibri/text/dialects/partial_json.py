"""Arguments of a call as an object, for APIs that take nothing else."""

from __future__ import annotations

import json
from typing import Any

_CLOSING = {"{": "}", "[": "]"}


def object_of(arguments: str) -> dict[str, Any]:
    """The object that a text spells, as far as it is one: what the model broke off is left out."""
    try:
        return _object(arguments)
    except (ValueError, RecursionError):
        ends = _ends(arguments)
    low, high = 0, len(ends)  # whatever ends before a good end is good
    while low < high:
        middle = (low + high + 1) // 2
        try:
            _object(_closed(arguments, *ends[middle - 1]))
            low = middle
        except (ValueError, RecursionError):
            high = middle - 1
    return _object(_closed(arguments, *ends[low - 1])) if low else {}


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _closed(text: str, end: int, open_brackets: str) -> str:
    return text[:end] + "".join(_CLOSING[b] for b in reversed(open_brackets))


def _ends(text: str) -> list[tuple[int, str]]:
    """Where a value may have ended: behind an opening, before a comma, behind a closing."""
    found: list[tuple[int, str]] = []
    brackets = ""
    in_string = escaped = False
    for index, letter in enumerate(text):
        if in_string:
            in_string, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            brackets += letter
            found.append((index + 1, brackets))
        elif letter == ",":
            found.append((index, brackets))
        elif letter in "}]":
            brackets = brackets[:-1]
            found.append((index + 1, brackets))
    return found
