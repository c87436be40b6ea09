"""Writes safetensors files for tests, sound ones and ones that no writer would make."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec, read_header

ITEMS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
Tensors = Mapping[str, np.ndarray]


def dtype_of(array: np.ndarray) -> str:
    """The safetensors spelling of an array's type (uint16 holds bfloat16)."""
    if array.dtype.names:  # one field, named for the dtype
        return array.dtype.names[0]
    return next(name for name, item in ITEMS.items() if item == array.dtype)


def entries(tensors: Tensors) -> dict[str, Any]:
    """The header of these tensors, laid out in the order given."""
    header, begin = {}, 0
    for name, array in tensors.items():
        end = begin + array.nbytes
        header[name] = {
            "dtype": dtype_of(array),
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    return header


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of that header (an object, or the bytes themselves) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, tensors: Tensors, blanks: int = 0) -> Path:
    """A sound file; `blanks` after the header move its data to any offset."""
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(raw_file(json.dumps(entries(tensors)).encode() + b" " * blanks, data))
    return path


def write_model(
    directory: Path, shards: Sequence[Tensors], config: Mapping[str, Any] | None = None
) -> Path:
    """A directory with config.json, numbered shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {}))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        write(directory / name, tensors)
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def split(tensors: Tensors, count: int) -> list[Tensors]:
    """Deal tensors out to `count` shards in turn, so that neighbours are never together."""
    return [dict(list(tensors.items())[i::count]) for i in range(count)]


def census(*paths: Path) -> Census:
    """The tensors of some files."""
    tensors: dict[str, TensorSpec] = {}
    for path in paths:
        tensors |= read_header(path)
    return Census(tensors)
