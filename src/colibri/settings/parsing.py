"""How values of settings are read, from flags, variables and keywords alike.

Each function returns the value or raises ValueError that says what is wanted, or SettingsError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from colibri.units import parse_bytes

Parse = Callable[[Any], Any]
_LEAST_SIZE = 4096  # fewer bytes than a page, without a unit, are a unit forgotten


def parse_count(value: object) -> int:
    """Return a whole number of at least 1, from itself or its digits."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def parse_seconds(value: object) -> float:
    """Return a time of more than nothing, from a number or its digits."""
    wanted = "a number of seconds, more than 0"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(wanted)
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError(wanted) from None
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(wanted)
    return seconds


def parse_size(value: object) -> int:
    """Return bytes, from a number of them or a text such as 12GiB."""
    wanted = "a size such as 12GiB, 800MB or 1073741824"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(wanted)
    try:
        size = parse_bytes(value)
    except ValueError:
        raise ValueError(wanted) from None
    if size < _LEAST_SIZE and str(value).strip().isdecimal():
        raise ValueError(f"{wanted}; did you mean {size}GiB?")
    return size


def parse_slots(value: object) -> int | float:
    """Return a number of slots, or a share of all experts: `25%` (or 0.25 as a float)."""
    wanted = "a number of experts of at least 1, or a share of all of them such as 25%"
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            value = float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(wanted) from None
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(wanted)
        return value
    try:
        return parse_count(value)
    except ValueError:
        raise ValueError(wanted) from None


def parse_switch(value: object) -> bool:
    """Return true or false, from itself or its name."""
    found = {"true": True, "false": False}.get(str(value).strip().lower())
    if found is None or not isinstance(value, str | bool):
        raise ValueError("true or false")
    return found


def parse_text(value: object) -> str:
    """Return a text that is not empty; paths are welcome."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise ValueError("a text that is not empty")
    return value


def parse_block(value: object) -> int:
    """Return bytes as `parse_size` does, or 0."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 0") from None


def parse_paths(value: object) -> tuple[str, ...]:
    """Return paths, from a sequence of them or a text that separates them as PATH does."""
    if isinstance(value, str):
        value = value.split(os.pathsep)
    if isinstance(value, os.PathLike):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("one or more directories")
    return tuple(map(parse_text, value))


def parse_texts(value: object) -> tuple[str, ...]:
    """Return texts, from a sequence of them or one text that separates them by commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("one or more texts")
    return tuple(map(parse_text, value))


def parse_port(value: object) -> int:
    """Return a port's number, from itself or its digits."""
    wanted = "a number from 0 to 65535"
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
        raise ValueError(wanted)
    return value


def one_of(*choices: str) -> Parse:
    """A parser that takes one of the words."""

    def parse(value: object) -> str:
        for known in choices:
            if value == known:
                return known
        raise ValueError(f"one of {', '.join(choices)}")

    return parse


def parse_activations(value: object) -> Any:
    """Return how inputs of integer-coded matrices are coded."""
    from colibri.kernels.api import Activations

    return Activations(one_of(*Activations)(value))


def parse_eviction(value: object) -> Any:
    """Return an eviction policy's name."""
    from colibri.memory.policies import EVICTIONS

    return one_of(*EVICTIONS)(value)


def parse_prefetch(value: object) -> Any:
    """Return when experts are read ahead."""
    from colibri.memory.prefetch import PREFETCH_MODES

    return one_of(*PREFETCH_MODES)(value)
