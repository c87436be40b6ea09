"""Headers and tensors of safetensors files, read by name.

The file is `u64 length | JSON header | data`. Nothing in the header sizes an allocation or a read
before it has been held against the file: every tensor must lie in the data, have the bytes its
shape and dtype ask for, and follow the one before without hole or overlap.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.strict_json import parse_object, shown
from colibri.errors import CheckpointError, IncompleteModelError

HEADER_LIMIT = 100_000_000  # bytes; the limit of the official reader
_LENGTH_BYTES = 8
_RANK_LIMIT = 32
_LARGEST = 2**63 - 1
_ALIGNMENT = 64
_KEYS = {"dtype", "shape", "data_offsets"}
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a tensor lies.

    Attributes:
        name: as the file spells it.
        dtype: as safetensors spells it: "F32", "BF16", "U8", …
        shape: its extents, row-major; `()` is a single value.
        file: the file that holds it.
        offset: its first byte, counted from the start of the file.
        nbytes: its bytes.
        skip: bytes between one of its rows and the next, which belong to others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    skip: int = 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, the last axis."""
        return self.nbytes // max(1, math.prod(self.shape[:-1]))

    @property
    def extent(self) -> int:
        """Bytes from its first to the first of what follows, skipped ones among them."""
        return self.nbytes + self.skip * math.prod(self.shape[:-1])

    @property
    def end(self) -> int:
        """Where in the file its last byte ends."""
        return self.offset + self.extent - self.skip


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of a safetensors file by name, in the order of the header.

    Raises:
        CheckpointError: the file cannot be read or its header is not valid; names file and tensor,
            wanted and found.
        IncompleteModelError: the file ends before its data does.
    """
    raw, size = _read_raw_header(path)
    entries = parse_object(raw, f"{path}: header")
    _check_metadata(path, entries.pop("__metadata__", {}))
    start = _LENGTH_BYTES + len(raw)
    specs = {name: _spec(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, specs.values(), start, size)
    return specs


def read_tensor(spec: TensorSpec) -> NDArray[np.uint8]:
    """The bytes of a tensor `[nbytes]`, 64-byte aligned.

    Raises:
        CheckpointError: see `read_into`; nothing has been allocated if the file is too short.
    """
    _check_length(spec)
    block = np.empty(spec.nbytes + _ALIGNMENT, np.uint8)
    first = -block.ctypes.data % _ALIGNMENT
    out = block[first : first + spec.nbytes]
    read_into(spec, out)
    return out


def read_into(spec: TensorSpec, out: NDArray[np.uint8]) -> None:
    """Read a tensor into `out [nbytes]`; the page cache does not keep a second copy.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter than its header was.
    """
    if spec.skip:
        _read_rows(spec, out)
        return
    view, done = out.data, 0
    try:
        with spec.file.open("rb", buffering=0) as file:
            file.seek(spec.offset)
            while done < spec.nbytes:
                count = file.readinto(view[done:])
                if not count:
                    _short(spec, spec.offset + done)
                done += count
            _forget(file.fileno(), spec)
    except OSError as problem:
        at = f"{spec.file}: tensor {spec.name!r} at byte {spec.offset + done}"
        raise CheckpointError(f"{at} cannot be read: {problem.strerror}") from None


def _read_rows(spec: TensorSpec, out: NDArray[np.uint8]) -> None:
    """Read rows and what lies between, and keep the rows."""
    row, nbytes = spec.row_nbytes, spec.end - spec.offset
    whole = np.empty(nbytes + spec.skip, np.uint8)  # the last row has nothing behind it
    read_into(replace(spec, nbytes=nbytes, skip=0), whole[:nbytes])
    out.reshape(-1, row)[:] = whole.reshape(-1, row + spec.skip)[:, :row]


def _read_raw_header(path: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path}: not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(_LENGTH_BYTES), size)
            raw = file.read(length)
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from None
    if len(raw) != length:
        raise IncompleteModelError(f"{path}: header: wanted {length} bytes, found {len(raw)}")
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: header: wanted '{{' first, found {shown(raw[:8])}")
    return raw, size


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if prefix == b"version ":
        raise IncompleteModelError(
            f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or size - _LENGTH_BYTES < length <= HEADER_LIMIT:
        raise IncompleteModelError(
            f"{path}: header: wanted {length} bytes behind the first 8, the file has {size} in all;"
            " it is cut off, fetch it again"
        )
    if not 0 < length <= HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: header: wanted a length of 1 to {HEADER_LIMIT}, found {length};"
            " is this a safetensors file?"
        )
    return length


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"{path}: __metadata__: wanted strings by name, found {shown(metadata)}"
        )


def _spec(path: Path, name: str, entry: Any, start: int) -> TensorSpec:
    """One entry of the header, checked for itself."""
    if type(entry) is not dict or entry.keys() != _KEYS:
        _refuse(path, name, "an object with dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in _BITS:
        _refuse(path, name, f"a dtype of {', '.join(_BITS)}", dtype)
    if type(shape) is not list or len(shape) > _RANK_LIMIT or not _are_counts(shape):
        _refuse(path, name, f"a shape of at most {_RANK_LIMIT} extents >= 0", shape)
    if type(offsets) is not list or len(offsets) != 2 or not _are_counts(offsets):
        _refuse(path, name, "two data_offsets >= 0", offsets)
    bits = _BITS[dtype]
    for extent in shape:
        bits *= extent
    begin, end = offsets
    if bits != (end - begin) * 8:
        wanted = f"{bits / 8:g}" if bits <= _LARGEST else "more than 2^63"
        _refuse(path, name, f"{wanted} bytes for {dtype} {shown(shape)}", offsets)
    return TensorSpec(name, dtype, tuple(shape), path, start + begin, end - begin)


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= _LARGEST for value in values)


def _check_layout(path: Path, specs: Iterable[TensorSpec], start: int, size: int) -> None:
    """Tensors follow one another from the end of the header to the end of the file."""
    cursor, before = start, "__metadata__"
    for spec in sorted(specs, key=lambda spec: (spec.offset, spec.nbytes)):
        if spec.offset != cursor:
            fault = "overlap" if spec.offset < cursor else "hole"
            wanted = f"byte {cursor}, behind {shown(before)}, as its first ({fault})"
            _refuse(path, spec.name, wanted, spec.offset)
        cursor, before = spec.offset + spec.nbytes, spec.name
        if cursor > size:
            raise IncompleteModelError(
                f"{path}: tensor {shown(spec.name)}: wanted bytes {spec.offset} to {cursor},"
                f" the file has {size}; it is cut off, fetch it again"
            )
    if cursor != size:
        raise CheckpointError(
            f"{path}: wanted the end of the file at byte {cursor}, behind {shown(before)};"
            f" found {size - cursor} bytes that belong to no tensor"
        )


def _refuse(path: Path, name: str, wanted: str, found: object) -> NoReturn:
    raise CheckpointError(f"{path}: tensor {shown(name)}: wanted {wanted}, found {shown(found)}")


def _check_length(spec: TensorSpec) -> None:
    try:
        size = spec.file.stat().st_size
    except OSError as problem:
        raise CheckpointError(f"{spec.file}: cannot be read: {problem.strerror}") from None
    if size < spec.end:
        _short(spec, size)


def _short(spec: TensorSpec, size: int) -> NoReturn:
    raise CheckpointError(
        f"{spec.file}: tensor {shown(spec.name)}: wanted bytes up to {spec.end},"
        f" found the end of the file at {size}; it has changed since its header was read"
    )


def _forget(descriptor: int, spec: TensorSpec) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, spec.offset, spec.nbytes, os.POSIX_FADV_DONTNEED)
