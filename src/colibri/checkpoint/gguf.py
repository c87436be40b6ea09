"""A GGUF model as a checkpoint: one file, or parts that count themselves (`-00001-of-00004`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.checkpoint.gguf_header import Header, Strings, read_gguf_header
from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1 << 12
_PROJECTORS = "mmproj"  # eyes and ears, which stand beside the text model
_LISTED = 10


@dataclass(frozen=True, slots=True, eq=False)
class Gguf:
    """Headers of all parts.

    Attributes:
        path: the file, or the first part.
        metadata: of the first part: numbers, strings, lists, and `Strings` that are not read yet.
        tensors: of all parts, by the name in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorSpec]

    @property
    def architecture(self) -> str:
        """What `general.architecture` says.

        Raises:
            CheckpointError: it is missing or no string.
        """
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{self.path}: key 'general.architecture': wanted a string, found {shown(found)}"
            )
        return found

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, None where there is no such key.

        Raises:
            CheckpointError: it is something else.
        """
        found = self.metadata.get(key)
        if found is None or isinstance(found, Strings):
            return None if found is None else found.read()
        raise CheckpointError(
            f"{self.path}: key {shown(key)}: wanted an array of strings, found {shown(found)}"
        )


def gguf_of(path: Path) -> Path | None:
    """The file, or the first part, that `path` means: a part, or a directory that holds one model.

    None where it means no GGUF model; safetensors in a directory come first.

    Raises:
        CheckpointError: the directory holds several.
    """
    if path.is_file():
        return _first_part(path) if path.suffix == SUFFIX else None
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    files = (each for each in path.glob(f"*{SUFFIX}") if not each.name.startswith(_PROJECTORS))
    models = sorted({_first_part(each) for each in files})
    if len(models) > 1:
        raise CheckpointError(
            f"{path}: holds {len(models)} GGUF models; name one of the files:"
            f" {_listed([each.name for each in models])}"
        )
    return models[0] if models else None


def read_gguf(path: Path) -> Gguf:
    """The headers of a file, or of all parts that belong to the first one.

    Raises:
        CheckpointError: a header is not valid, or parts contradict each other.
        IncompleteModelError: parts or tensors are missing.
        UnsupportedModelError: a version or a type of tensor that is not read.
    """
    parts = parts_of(path)
    first = read_gguf_header(parts[0])
    _check_count(parts[0], first, 0, len(parts))
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], 1):
        header = read_gguf_header(part)
        _check_count(part, header, number, len(parts))
        if twice := tensors.keys() & header.tensors.keys():
            name = min(twice)
            raise CheckpointError(
                f"{part}: tensor {shown(name)} is also in {tensors[name].file.name};"
                " fetch the files of one model"
            )
        tensors |= header.tensors
    wanted = first.metadata.get("split.tensors.count")
    if len(parts) > 1 and wanted not in (None, len(tensors)):
        raise IncompleteModelError(
            f"{parts[0]}: wanted {wanted} tensors in all parts, found {len(tensors)};"
            " fetch the files again"
        )
    return Gguf(parts[0], first.metadata, tensors)


def _first_part(path: Path) -> Path:
    found = _PART.fullmatch(path.name)
    if found is None:
        return path
    return path.with_name(f"{found[1]}-{1:05}-of-{found[3]}{SUFFIX}")


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts that it counts among.

    Raises:
        CheckpointError, IncompleteModelError: too many, or some are missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    total = int(found[3])
    if not 0 < total <= _MOST_PARTS:
        raise CheckpointError(f"{path}: wanted 1 to {_MOST_PARTS} parts, found {total}")
    parts = [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}")
        for number in range(1, total + 1)
    ]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise IncompleteModelError(
            f"{path.parent}: found {total - len(missing)} of the {total} parts of"
            f" {path.name}; missing are {_listed(missing)}; fetch what is missing"
        )
    return parts


def _check_count(path: Path, header: Header, number: int, total: int) -> None:
    """What a part says of its place; a file that stands alone may say nothing."""
    count, place = (header.metadata.get(f"split.{key}") for key in ("count", "no"))
    if count in (None, 0, 1) and total == 1:
        return
    if count != total or place != number:
        raise CheckpointError(
            f"{path}: wanted part {number} of {total} as its name says (split.no, split.count),"
            f" found {shown(place)} of {shown(count)}; give the files of one model their own names"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
