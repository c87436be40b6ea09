"""The header of a GGUF file, read strictly: metadata by key and tensors by name.

The file is `GGUF | u32 version | u64 tensors | u64 keys`, the keys, the tensors, then data from the
next multiple of `general.alignment` on (the format's specification beside ggml). Nothing in it
sizes an allocation or a read before it has been held against the length of the file. Arrays of
strings, which hold a vocabulary, are passed over and read when they are asked for.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.formats.ggml import BY_NUMBER

MAGIC = b"GGUF"
ALIGNMENT_KEY = "general.alignment"
_VERSIONS = (2, 3)
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 20
_MOST_NAME, _MOST_STRING, _MOST_ALIGNMENT = 1 << 10, 1 << 26, 1 << 20
_MOST_RANK, _MOST_DEPTH, _LARGEST = 4, 4, 2**63 - 1
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# Types of plain items: dtype as safetensors spells it, and bytes.
_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_UNREAD = {
    **{9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s"},
    **{22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"},
    **{29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4"},
}


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings of a file, not read yet.

    Attributes:
        path: the file.
        offset: of the first one's length.
        count: how many.
    """

    path: Path
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self) -> list[str]:
        """The strings; what is no UTF-8 in them becomes U+FFFD.

        Raises:
            CheckpointError: the file has changed or cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                source = _Source(self.path, file, self.path.stat().st_size)
                return [source.string("a string", _MOST_STRING) for _ in range(self.count)]
        except OSError as problem:
            raise CheckpointError(f"{self.path}: cannot be read: {problem.strerror}") from None


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says of itself.

    Attributes:
        metadata: numbers, strings, lists of numbers, and `Strings`, by key.
        tensors: by name; shapes row-major, as NumPy has them; dtypes of blocks are their type's
            name in capitals.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorSpec]


class _Source:
    """Reads from a file whose size is known, and never asks for more than is left."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = file.tell()

    def take(self, nbytes: int, what: str) -> bytes:
        self.require(nbytes, what)
        data = self.file.read(nbytes)
        self.at += len(data)
        if len(data) < nbytes:
            self.cut_off(nbytes, what)
        return data

    def require(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.at:
            self.cut_off(nbytes, what)

    def cut_off(self, nbytes: int, what: str) -> NoReturn:
        raise IncompleteModelError(
            f"{self.path}: {what}: wanted {nbytes} bytes at byte {self.at}, the file has"
            f" {self.size}; it is cut off or damaged, fetch it again"
        )

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return value

    def string(self, what: str, most: int) -> str:
        return self.raw_string(what, most).decode("utf-8", errors="replace")

    def raw_string(self, what: str, most: int) -> bytes:
        length: int = self.number("Q", what)
        if length > most:
            self.refuse(what, f"at most {most} bytes", length)
        return self.take(length, what)

    def refuse(self, what: str, wanted: str, found: object) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}: wanted {wanted}, found {shown(found)}")


def is_gguf(path: Path) -> bool:
    """Whether a file says that it is one."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> Header:
    """Metadata and tensors of one file.

    Raises:
        CheckpointError: the file cannot be read or its header is not valid; names file, key or
            tensor, wanted and found.
        IncompleteModelError: the file ends before its data does.
        UnsupportedModelError: a version or a type of tensor that is not read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            return _read(_Source(path, file, size))
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from None


def _read(source: _Source) -> Header:
    _check_start(source)
    num_tensors = _count(source, "tensors", _MOST_TENSORS)
    num_keys = _count(source, "keys", _MOST_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = source.string("the name of a key", _MOST_NAME)
        if key in metadata:
            raise CheckpointError(f"{source.path}: the key {shown(key)} stands there twice")
        metadata[key] = _value(source, source.number("I", f"key {shown(key)}"), key, 0)
    alignment = metadata.get(ALIGNMENT_KEY, 32)
    if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT or alignment % 8:
        source.refuse(ALIGNMENT_KEY, f"a multiple of 8 up to {_MOST_ALIGNMENT}", alignment)
    entries = [_tensor(source) for _ in range(num_tensors)]
    start = -(-source.at // alignment) * alignment
    tensors: dict[str, TensorSpec] = {}
    for entry in entries:
        spec = entry(start, alignment)
        if spec.name in tensors:
            raise CheckpointError(f"{source.path}: tensor {shown(spec.name)} stands there twice")
        tensors[spec.name] = spec
    _check_places(source, tensors)
    return Header(metadata, tensors)


def _check_start(source: _Source) -> None:
    magic = source.take(4, "its first bytes")
    if magic != MAGIC:
        source.refuse("its first bytes", "'GGUF'", magic)
    version: int = source.number("I", "its version")
    if version not in _VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        order = ", its bytes in the order of big-endian machines" if turned else ""
        raise UnsupportedModelError(
            f"{source.path}: GGUF version {version}{order}: wanted 2 or 3, little-endian;"
            " fetch a newer file of this model"
        )


def _count(source: _Source, what: str, most: int) -> int:
    count: int = source.number("Q", f"the number of {what}")
    if count > most:
        source.refuse(f"the number of {what}", f"at most {most}", count)
    return count


def _value(source: _Source, kind: int, key: str, depth: int) -> Any:
    what = f"key {shown(key)}"
    if kind in _SCALARS:
        return _plain(source.number(_SCALARS[kind], what), kind)
    if kind == _STRING:
        return source.string(what, _MOST_STRING)
    if kind == _ARRAY and depth < _MOST_DEPTH:
        return _array(source, key, depth)
    source.refuse(what, "a type of value from 0 to 12", kind)


def _plain(value: Any, kind: int) -> Any:
    """A float32 as the shortest decimal that stands for it: what was written."""
    if kind != 6 or not math.isfinite(value):
        return value
    return next(
        short for digits in range(6, 10) if _same(short := float(f"{value:.{digits}g}"), value)
    )


def _same(short: float, value: float) -> bool:
    try:
        return bool(struct.pack("<f", short) == struct.pack("<f", value))
    except OverflowError:
        return False


def _array(source: _Source, key: str, depth: int) -> Any:
    what = f"key {shown(key)}"
    kind, count = source.number("I", what), source.number("Q", what)
    if kind in _SCALARS:
        code = _SCALARS[kind]
        data = source.take(count * struct.calcsize(f"<{code}"), what)
        values = struct.unpack(f"<{count}{code}", data)
        return [_plain(value, kind) for value in values] if count <= 1 << 12 else list(values)
    source.require(count * 8, what)  # at least the lengths of its strings, or of its arrays
    if kind == _STRING:
        found = Strings(source.path, source.at, count)
        for _ in range(count):
            source.raw_string(what, _MOST_STRING)
        return found
    return [_value(source, kind, key, depth + 1) for _ in range(count)]


def _tensor(source: _Source) -> Callable[[int, int], TensorSpec]:
    """One entry, checked for itself; its place is known when all have been read."""
    name = source.string("the name of a tensor", _MOST_NAME)
    what = f"tensor {shown(name)}"
    rank: int = source.number("I", what)
    if not 0 < rank <= _MOST_RANK:
        source.refuse(what, f"1 to {_MOST_RANK} dimensions", rank)
    extents = [source.number("Q", what) for _ in range(rank)]
    kind, offset = source.number("I", what), source.number("Q", what)
    if not all(0 < extent <= _LARGEST for extent in extents) or math.prod(extents) > _LARGEST:
        source.refuse(what, "extents above 0, below 2^63 in all", extents)
    dtype, nbytes = _size(source, name, kind, extents)

    def placed(start: int, alignment: int) -> TensorSpec:
        if offset % alignment or offset > _LARGEST:
            source.refuse(what, f"an offset that is a multiple of {alignment}", offset)
        return TensorSpec(name, dtype, tuple(extents[::-1]), source.path, start + offset, nbytes)

    return placed


def _size(source: _Source, name: str, kind: int, extents: list[int]) -> tuple[str, int]:
    """Dtype and bytes."""
    count = math.prod(extents)
    if kind in _PLAIN:
        dtype, size = _PLAIN[kind]
        return dtype, count * size
    block = BY_NUMBER.get(kind)
    if block is None:
        known = ", ".join([*(dtype.lower() for dtype, _ in _PLAIN.values()), *_names()])
        raise UnsupportedModelError(
            f"{source.path}: tensor {shown(name)} is of type {_UNREAD.get(kind, kind)}, which is"
            f" not read; read are {known}"
        )
    if extents[0] % block.block:
        wanted = f"rows that are a multiple of {block.block} for {block.name}"
        source.refuse(f"tensor {shown(name)}", wanted, extents[0])
    return block.dtype, count // block.block * block.nbytes


def _names() -> Iterator[str]:
    return (kind.name for kind in BY_NUMBER.values())


def _check_places(source: _Source, tensors: Mapping[str, TensorSpec]) -> None:
    """Tensors lie within the file and not upon each other."""
    before: TensorSpec | None = None
    for spec in sorted(tensors.values(), key=lambda spec: spec.offset):
        if before is not None and spec.offset < before.end:
            source.refuse(
                f"tensor {shown(spec.name)}",
                f"byte {before.end} or later, behind {shown(before.name)}, as its first",
                spec.offset,
            )
        if spec.end > source.size:
            raise IncompleteModelError(
                f"{source.path}: tensor {shown(spec.name)}: wanted bytes {spec.offset} to"
                f" {spec.end}, the file has {source.size}; it is cut off, fetch it again"
            )
        before = spec
