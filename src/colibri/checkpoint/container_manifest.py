"""What a container says of itself in `colibri.json`, which is written last and makes it one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.strict_json import clipped, read_object, shown
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.formats import ID_FORMATS, Format, get_format

VERSION = 1
LAYOUT = "panels-8"
MANIFEST = "colibri.json"
PROGRESS = ".convert-progress.json"
FILE_NAME = re.compile(r"(experts|dense)-\d{5,}\.safetensors")
_SIZE_LIMIT = 256 << 20
_LARGEST = 1 << 62  # of any size or dimension
Dense: TypeAlias = tuple[Format, tuple[int, ...]]


def layer_file(layer: int) -> str:
    """The file of a MoE layer's experts."""
    return f"experts-{layer:05}.safetensors"


def expert_tensor(layer: int, expert: int) -> str:
    """The tensor that is an expert's record."""
    return f"experts.{layer}.{expert}"


def checksum_tensor(layer: int) -> str:
    """The tensor of CRC-32C `[E]` of a layer's records, padding included."""
    return f"crc32c.{layer}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Measure a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return cls(path.stat().st_size, digest.hexdigest())

    def to_json(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {"bytes": self.nbytes, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `colibri.json`.

    Attributes:
        family: the model_type of the configuration.
        source: what was written and how, in names and text.
        num_experts: experts of each MoE layer.
        layouts: how each MoE layer's records are laid out.
        dense: format and shape of every dense tensor.
        files: every safetensors file.
    """

    family: str
    source: Mapping[str, str]
    num_experts: Mapping[int, int]
    layouts: Mapping[int, RecordLayout]
    dense: Mapping[str, Dense]
    files: Mapping[str, FileRecord]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a `colibri.json`; the files themselves are not looked at.

        Raises:
            CheckpointError: not of this form; names the key.
            UnsupportedModelError: a version, layout or format that this release does not know.
        """
        value = read_object(path, _SIZE_LIMIT)
        try:
            _require_known(value)
            return cls._from_json(value)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            missing = isinstance(error, KeyError)
            what = f"the key {error} is missing" if missing else str(error)
            raise CheckpointError(
                f"{path}: broken: {clipped(what)}; convert the model again or fetch the file again"
            ) from None

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> Manifest:
        parts, num_experts = value["parts"], value["num_experts"]
        if parts.keys() != num_experts.keys():
            raise ValueError("parts and num_experts name different layers")
        manifest = cls(
            family=_text(value["family"]),
            source={key: _text(text) for key, text in value["source"].items()},
            num_experts={_layer(key): _count(num) for key, num in num_experts.items()},
            layouts={_layer(key): RecordLayout.from_json(part) for key, part in parts.items()},
            dense={name: dense_from_json(about) for name, about in value["dense"].items()},
            files={name: _file(name, about) for name, about in value["files"].items()},
        )
        if manifest.group_sizes != value["group_sizes"]:
            raise ValueError(
                f"group_sizes are {shown(value['group_sizes'])},"
                f" the formats say {manifest.group_sizes}"
            )
        return manifest

    @property
    def group_sizes(self) -> dict[str, int]:
        """Weights that share a scale, for each coded format."""
        formats = {part.format for layout in self.layouts.values() for part in layout.parts}
        formats |= {fmt for fmt, _ in self.dense.values()}
        return {fmt.name: fmt.group for fmt in _by_name(formats) if fmt.is_coded}

    def to_json(self) -> dict[str, Any]:
        """The contents of the file."""
        return {
            "version": VERSION,
            "layout": LAYOUT,
            "family": self.family,
            "source": dict(self.source),
            "group_sizes": self.group_sizes,
            "num_experts": {str(layer): count for layer, count in self.num_experts.items()},
            "parts": {str(layer): layout.to_json() for layer, layout in self.layouts.items()},
            "dense": {name: dense_json(*about) for name, about in self.dense.items()},
            "files": {name: self.files[name].to_json() for name in sorted(self.files)},
        }


def dense_json(fmt: Format, shape: Sequence[int]) -> dict[str, Any]:
    """How the manifest describes a dense tensor."""
    return {"format": fmt.name, "shape": list(shape)}


def dense_from_json(about: Mapping[str, Any]) -> Dense:
    """What `dense_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: not of that form.
        UnsupportedModelError: an unknown format.
    """
    name, shape = _text(about["format"]), tuple(_count(n) for n in about["shape"])
    fmt = ID_FORMATS.get(name) or get_format(name)
    if not fmt.is_plain and len(shape) != 2:
        raise ValueError(f"{list(shape)} is no shape of a matrix in {fmt.name}")
    return fmt, shape


def _require_known(value: Mapping[str, Any]) -> None:
    """Refuse what a later release wrote."""
    found = (value["version"], value["layout"])
    if found != (VERSION, LAYOUT):
        raise UnsupportedModelError(
            f"version {shown(found[0])}, layout {shown(found[1])}; this release reads version"
            f" {VERSION}, layout {LAYOUT!r}: update Colibri or convert the model again"
        )


def _by_name(formats: Iterable[Format]) -> list[Format]:
    return sorted(formats, key=lambda fmt: fmt.name)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} should be text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 < value < _LARGEST:
        raise ValueError(f"{shown(value)} should be a positive whole number")
    return value


def _layer(key: str) -> int:
    if not key.isascii() or not key.isdigit() or str(int(key[:9])) != key:
        raise ValueError(f"{shown(key)} should be the number of a layer")
    return int(key)


def _file(name: str, about: Mapping[str, Any]) -> FileRecord:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name of a container's file")
    return FileRecord(_count(about["bytes"]), _text(about["sha256"]))
