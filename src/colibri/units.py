"""The only place where quantities are parsed from text and printed for people."""

from __future__ import annotations

import re

_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str | int) -> int:
    """Turn `12GiB`, `800MB`, `1.5g` or a plain number of bytes into bytes.

    `GiB` and the bare letter `G` mean 1024^3; `GB` means 1000^3.

    Raises:
        ValueError: the text is no size or not positive.
    """
    if isinstance(text, int):
        return _positive(text, text)
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it like 12GiB, 800MB or 1073741824")
    number, letter, binary = match.groups()
    bare_letter = bool(letter) and not text.strip().lower().endswith("b")
    base = 1024 if binary or bare_letter else 1000
    return _positive(int(float(number) * base ** _POWER[letter.lower()]), text)


def _positive(value: int, text: str | int) -> int:
    if value <= 0:
        raise ValueError(f"{text!r} is not a size: it must be more than zero bytes")
    return value


def format_bytes(value: float) -> str:
    """Print bytes with a binary unit: 1536 -> `1.5 KiB`."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def format_bytes_up(value: int) -> str:
    """Print bytes rounded up, so that `parse_bytes` of the text gives at least `value`."""
    power = min(max(value.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{value} B"
    tenths = -(-value * 10 // 1024**power)
    return f"{tenths // 10}.{tenths % 10} {'KMGT'[power - 1]}iB"


def format_seconds(value: float) -> str:
    """Print a duration: `0.42 s`, `3 min 05 s`, `1 h 02 min`."""
    if value < 60:
        return f"{value:.2f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
