"""Weight formats by name. Nothing infers a format from byte counts or from a path."""

from __future__ import annotations

import difflib

from colibri.errors import UnsupportedModelError
from colibri.formats.affine import AFFINE_G16, AFFINE_G32, AffineFormat
from colibri.formats.base import (
    PANEL_ROWS,
    SCAN_BF16,
    SCAN_E4M3,
    SCAN_E8M0,
    SCAN_F16,
    SCAN_F32,
    Bytes,
    Floats,
    Format,
    Scan,
    Shape,
    padded,
)
from colibri.formats.float import BF16, F16, F32, FloatFormat
from colibri.formats.fp8 import FP8_B16, FP8_B32, FP8_B64, FP8_B128, FP8Format
from colibri.formats.integer import INT4_G32, INT8_G32, IntegerFormat
from colibri.formats.microscaling import MXFP4, MXFP4Format
from colibri.formats.rows import INT8_ROWS, RowInt8Format
from colibri.formats.super_blocks import Q4_K, Q6_K, SuperBlockFormat
from colibri.formats.whole import I32, I64, WholeFormat

__all__ = [
    "AFFINE_G16",
    "AFFINE_G32",
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "FP8_B16",
    "FP8_B32",
    "FP8_B64",
    "FP8_B128",
    "I32",
    "I64",
    "ID_FORMATS",
    "INT8_ROWS",
    "MXFP4",
    "PANEL_ROWS",
    "Q4_K",
    "Q6_K",
    "SCAN_BF16",
    "SCAN_E4M3",
    "SCAN_E8M0",
    "SCAN_F16",
    "SCAN_F32",
    "AffineFormat",
    "Bytes",
    "FP8Format",
    "FloatFormat",
    "Floats",
    "Format",
    "IntegerFormat",
    "MXFP4Format",
    "RowInt8Format",
    "Scan",
    "Shape",
    "SuperBlockFormat",
    "WholeFormat",
    "get_format",
    "padded",
]

_ALL: tuple[Format, ...] = (
    F32,
    F16,
    BF16,
    FP8_B128,
    FP8_B64,
    FP8_B32,
    FP8_B16,
    INT8_G32,
    IntegerFormat(8, 64, 17),
    IntegerFormat(8, 128, 18),
    INT4_G32,
    IntegerFormat(4, 64, 33),
    IntegerFormat(4, 128, 34),
    *(IntegerFormat(4, group, 96 + i, BF16) for i, group in enumerate((32, 64, 128))),
    MXFP4,
    Q4_K,
    Q6_K,
    AFFINE_G32,
    AFFINE_G16,
)
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _ALL}
# Not of weights, so that nothing is coded in them.
ID_FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (I32, I64)}


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
