"""Weight formats by name. Nothing infers a format from byte counts or from a path."""

from __future__ import annotations

import difflib

from colibri.errors import UnsupportedModelError
from colibri.formats.base import PANEL_ROWS, Bytes, Floats, Format, Shape, padded
from colibri.formats.float import BF16, F16, F32, FloatFormat
from colibri.formats.integer import IntegerFormat

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "PANEL_ROWS",
    "Bytes",
    "FloatFormat",
    "Floats",
    "Format",
    "IntegerFormat",
    "Shape",
    "get_format",
    "padded",
]

_ALL: tuple[Format, ...] = (
    F32,
    F16,
    BF16,
    *(IntegerFormat(8, group, 16 + i) for i, group in enumerate((32, 64, 128))),
    *(IntegerFormat(4, group, 32 + i) for i, group in enumerate((32, 64, 128))),
)
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _ALL}


def get_format(name: str) -> Format:
    """The format of that name.

    Raises:
        UnsupportedModelError: no such format; the message suggests the nearest and lists all.
    """
    try:
        return FORMATS[name]
    except KeyError:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnsupportedModelError(
            f"unknown weight format {name!r}: {hint}known are {', '.join(FORMATS)}"
        ) from None
