"""JSON as a checkpoint may hold it: UTF-8, one object, no key twice.

The standard reader keeps the last of two equal keys and takes NaN; both would let a broken file
pass for a good one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colibri.errors import CheckpointError

_SHOWN = 120  # characters of a foreign value that an error message repeats


def parse_object(
    raw: bytes, source: str, error: type[CheckpointError] = CheckpointError, infinity: bool = False
) -> dict[str, Any]:
    """The object that `raw` spells.

    Args:
        raw: the whole text.
        source: what it is, for messages: "header of model.safetensors".
        error: the type to raise.
        infinity: whether `Infinity` is a number here (configs of some model types hold it).

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, a key twice, NaN, or not an object.
    """

    def constant(text: str) -> float:
        if infinity and text.endswith("Infinity"):
            return float(text)
        raise ValueError(f"{text} is no value here")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=constant)
    except RecursionError:
        raise error(f"{source}: nested too deeply") from None
    except ValueError as problem:
        raise error(f"{source}: not valid JSON: {clipped(str(problem))}") from None
    if not isinstance(value, dict):
        raise error(f"{source}: wanted a JSON object, found {shown(value)}")
    return value


def read_object(
    path: Path, limit: int, error: type[CheckpointError] = CheckpointError, infinity: bool = False
) -> dict[str, Any]:
    """The object in the file `path`, which may have `limit` bytes.

    Raises:
        CheckpointError: the file cannot be read, is larger, or `parse_object` refuses it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    if len(raw) > limit:
        raise error(f"{path}: wanted at most {limit} bytes, found {path.stat().st_size}")
    return parse_object(raw, str(path), error, infinity)


def shown(value: object) -> str:
    """`repr(value)`, cut where a hostile file would fill the screen."""
    return clipped(repr(value))


def clipped(text: str) -> str:
    """At most `_SHOWN` characters of `text`."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands there twice")
    return found
