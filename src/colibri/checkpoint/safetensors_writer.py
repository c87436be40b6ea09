"""Writes safetensors files, optionally with data that starts on a page.

The header is JSON padded with blanks, which the format allows; it allows neither holes between
tensors nor bytes after the last.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.formats import FORMATS, Bytes, FloatFormat, padded

_LENGTH_BYTES = 8  # of the little-endian header length that starts a file
_MIN_ALIGN = 8  # of the data where nobody asks for more: no tensor type is wider
DTYPE_OF_FORMAT = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32", "i64": "I64"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a header: name, safetensors type (`F32`, `U8`, …), shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def entries_of(header: Mapping[str, Any]) -> list[Entry]:
    """The tensors of a header that was read as JSON and is known to be valid, in its order."""
    return [
        Entry(name, about["dtype"], tuple(about["shape"]), last - first)
        for name, about in header.items()
        if name != "__metadata__"
        for first, last in [about["data_offsets"]]
    ]


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that is made piece by piece when it is written."""

    entry: Entry
    make: Callable[[], Iterable[Bytes]]


def encode_header(entries: Sequence[Entry], *, align: int = _MIN_ALIGN, room: int = 0) -> bytes:
    """Length and header of a file that holds `entries` in this order, up to where data starts.

    Args:
        entries: the tensors.
        align: data starts at a multiple of this.
        room: data starts here, or later where the header is longer; itself a multiple of `align`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        ends = [offset, offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": ends,
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    start = max(padded(_LENGTH_BYTES + len(text), align), room)
    return (start - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(
        start - _LENGTH_BYTES
    )


def write_safetensors(path: Path, tensors: Sequence[Pending]) -> None:
    """Write one file under a temporary name, flush it to the disk, and give it its name.

    Tensors are ordered by descending width of their type, so that each is aligned.
    """
    ordered = sorted(tensors, key=lambda t: -_width(t.entry))
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as out:
        out.write(encode_header([tensor.entry for tensor in ordered]))
        for tensor in ordered:
            for piece in tensor.make():
                out.write(piece.data)
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file in one step: whoever reads it sees the old or the new one, whole."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w", encoding="utf-8") as out:
        json.dump(value, out, indent=1, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)


def float_tensor(name: str, values: NDArray[np.float32], dtype: str) -> Pending:
    """A tensor of any shape, rounded to `F32`, `F16` or `BF16` when it is written."""
    fmt = FORMATS[dtype.lower()]
    assert isinstance(fmt, FloatFormat)
    entry = Entry(name, DTYPE_OF_FORMAT[fmt.name], values.shape, values.size * fmt.dtype.itemsize)
    return Pending(
        entry, lambda: [np.ascontiguousarray(fmt.from_float32(values)).reshape(-1).view(np.uint8)]
    )


def ids_tensor(name: str, values: NDArray[np.int64]) -> Pending:
    """A table of ids, as `I64`."""
    entry = Entry(name, "I64", values.shape, values.nbytes)
    return Pending(entry, lambda: [np.ascontiguousarray(values).reshape(-1).view(np.uint8)])


def save_hf(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32] | NDArray[np.int64]],
    *,
    shards: int = 1,
    dtype: str = "F32",
) -> None:
    """Write a Hugging Face checkpoint: `tensors`, rounded to `dtype`, in `shards` files."""
    pending = [
        ids_tensor(name, values.astype(np.int64))
        if values.dtype == np.int64
        else float_tensor(name, np.asarray(values, np.float32), dtype)
        for name, values in tensors.items()
    ]
    save_pending(directory, config, pending, shards=shards)


def save_pending(
    directory: Path, config: Mapping[str, Any], tensors: Sequence[Pending], *, shards: int = 1
) -> None:
    """`save_hf` of tensors that are made as they are written; shards are about equally large."""
    directory.mkdir(parents=True, exist_ok=True)
    groups = _shards(tensors, shards)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = (
            f"model-{number:05}-of-{len(groups):05}.safetensors"
            if len(groups) > 1
            else "model.safetensors"
        )
        write_safetensors(directory / name, group)
        weight_map |= {tensor.entry.name: name for tensor in group}
    if len(groups) > 1:
        total = sum(tensor.entry.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)
    write_json(directory / "config.json", dict(config))


def _shards(tensors: Sequence[Pending], shards: int) -> list[list[Pending]]:
    """Cut the sequence into at most that many runs of about equal bytes; none is empty."""
    total = sum(tensor.entry.nbytes for tensor in tensors)
    groups: dict[int, list[Pending]] = {}
    done = 0
    for tensor in tensors:
        middle = done + tensor.entry.nbytes / 2
        groups.setdefault(min(int(middle * shards / max(total, 1)), shards - 1), []).append(tensor)
        done += tensor.entry.nbytes
    return list(groups.values())


def _width(entry: Entry) -> int:
    """Bytes of one item."""
    count = int(np.prod(entry.shape, dtype=np.int64))
    return entry.nbytes // count if count else 0
