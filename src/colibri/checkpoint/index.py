"""A directory as a checkpoint: its config and where each of its tensors lies.

The shards are those of `model.safetensors.index.json`, else every `model*.safetensors`; in a
converted directory (`colibri.json`) they are the files named there. Other .safetensors beside them
are listed and not read.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.checkpoint.config import read_config, with_model_type
from colibri.checkpoint.container import Container, open_container
from colibri.checkpoint.container_manifest import MANIFEST
from colibri.checkpoint.gguf import Gguf, gguf_of, read_gguf
from colibri.checkpoint.safetensors import TensorSpec, read_header
from colibri.checkpoint.strict_json import read_object, shown
from colibri.errors import CheckpointError, IncompleteModelError

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_LIMIT = 256 * 2**20  # half a million tensors take some 50 MB
_LEFTOVERS = ("*.part", "*.incomplete", "*.aria2", "*.tmp", ".cache/**/*.incomplete")
_LISTED = 10


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint: headers have been read and checked, no weights.

    Attributes:
        directory: where it lies.
        config: config.json as it is spelled there; see `config.normalize`.
        tensors: every tensor of its shards, by the name on disk. In a converted directory only the
            dense ones, without checksums; those that `container.coded` names are resident bytes,
            of dtype U8.
        ignored_files: .safetensors files beside the shards, which are not part of the model.
        container: the converted experts, or None.
        gguf: what a GGUF file says; then `config` is empty but for a `model_type` that was asked
            for, and `tensors` have the file's names (`models.gguf.adopted` gives both).
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    ignored_files: tuple[Path, ...]
    container: Container | None = None
    gguf: Gguf | None = None

    @property
    def place(self) -> Path:
        """What it is called in messages: its directory, or the GGUF file."""
        return self.directory if self.gguf is None else self.gguf.path

    @classmethod
    def open(cls, directory: str | Path, model_type: str | None = None) -> Checkpoint:
        """Read config and headers; `model_type`, where given, counts instead of config.json's.

        `directory` may be a GGUF file, any part of one, or a directory that holds no other weights.

        Raises:
            CheckpointError: no such directory, no config.json, a broken header, or shards that
                contradict the index or each other.
            IncompleteModelError: shards or tensors are missing; the message gives found and
                expected counts.
        """
        directory = Path(directory)
        if (found := gguf_of(directory)) is not None:
            return cls._open_gguf(found, model_type)
        check_directory(directory)
        container = open_container(directory)  # an unfinished one has no config.json yet
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"{directory}: no config.json; name the folder that holds it and the weights"
            )
        config = read_config(directory / "config.json")
        if model_type is not None:
            config = with_model_type(config, model_type)
        with _no_garbage():
            if container is not None:
                tensors, shards = _read_container(directory, container)
            else:
                indexed = (directory / INDEX_NAME).exists()
                tensors = _read_indexed(directory) if indexed else _merge(_find_shards(directory))
                shards = {spec.file for spec in tensors.values()}
        ignored = (path for path in sorted(directory.glob("*.safetensors")) if path not in shards)
        return cls(directory, config, tensors, tuple(ignored), container)

    @classmethod
    def _open_gguf(cls, path: Path, model_type: str | None) -> Checkpoint:
        with _no_garbage():
            source = read_gguf(path)
        config = {} if model_type is None else {"model_type": model_type}
        return cls(path.parent, config, source.tensors, (), None, source)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause the cyclic collector, which would spend longer on half a million entries than we do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_container(
    directory: Path, container: Container
) -> tuple[dict[str, TensorSpec], set[Path]]:
    """The dense tensors of a container, and all its files."""
    shards = {directory / name for name in container.manifest.files if name.endswith(_SUFFIX)}
    tensors = _merge(sorted(path for path in shards if path.name.startswith("dense-")))
    for checksum in container.checksums.values():
        del tensors[checksum.name]
    return tensors, shards


def _read_indexed(directory: Path) -> dict[str, TensorSpec]:
    """The tensors of the shards that the index names, which must agree with it."""
    places = _read_index(directory / INDEX_NAME)
    shards: dict[str, set[str]] = {}
    for name, shard in places.items():
        shards.setdefault(shard, set()).add(name)
    _check_present(directory, sorted(shards), INDEX_NAME)
    tensors: dict[str, TensorSpec] = {}
    for shard in sorted(shards):
        header = read_header(directory / shard)
        if header.keys() != shards[shard]:
            _contradiction(directory / shard, header, shards[shard], places)
        tensors |= header
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """`weight_map`: the shard of each tensor, a plain file name."""
    places = read_object(path, _INDEX_LIMIT).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: weight_map: wanted files by tensor, found {shown(places)}")
    plain = re.compile(r"[^/\\\0]+\.safetensors").fullmatch
    for name, shard in places.items():
        if not isinstance(shard, str) or not plain(shard):
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: wanted the name of a .safetensors file beside it,"
                f" found {shown(shard)}"
            )
    return places


def _contradiction(
    shard: Path, header: dict[str, TensorSpec], wanted: set[str], places: dict[str, str]
) -> None:
    """Say how a shard differs from the index."""
    if missing := sorted(wanted - header.keys()):
        raise IncompleteModelError(
            f"{shard}: found {len(wanted) - len(missing)} of the {len(wanted)} tensors that"
            f" {INDEX_NAME} places there; missing are {_listed(missing)}; fetch the file again"
        )
    extra = min(header.keys() - wanted)
    other = f"places it in {places[extra]}" if extra in places else "does not know it"
    raise CheckpointError(
        f"{shard}: tensor {shown(extra)} is here, but {INDEX_NAME} {other};"
        " shards and index are not of one checkpoint"
    )


def _find_shards(directory: Path) -> list[Path]:
    """Every `model*.safetensors`; a set that counts itself (`-00001-of-00004`) must be whole."""
    shards = sorted(directory.glob("model*.safetensors"))
    if not shards:
        raise IncompleteModelError(_no_weights(directory))
    for shard in shards:
        if numbered := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)\.safetensors", shard.name):
            stem, number, of, total = numbered.groups()
            if int(total) > 10**5:
                raise CheckpointError(f"{shard}: wanted at most 100000 shards, found {total}")
            names = (f"{stem}{i:0{len(number)}}{of}{total}" for i in range(1, int(total) + 1))
            _check_present(directory, [f"{name}.safetensors" for name in names], shard.name)
    return shards


def _check_present(directory: Path, names: Sequence[str], source: str) -> None:
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise IncompleteModelError(
            f"{directory}: found {len(names) - len(missing)} of the {len(names)} shards that"
            f" {source} names; missing are {_listed(missing)}{_leftovers(directory)};"
            " fetch what is missing"
        )


def _merge(shards: Iterable[Path]) -> dict[str, TensorSpec]:
    """The tensors of several files, none of which may be in two of them."""
    tensors: dict[str, TensorSpec] = {}
    for shard in shards:
        header = read_header(shard)
        if twice := tensors.keys() & header.keys():
            name = min(twice)
            raise CheckpointError(
                f"{shard}: tensor {shown(name)} is also in {tensors[name].file.name};"
                " remove the file that does not belong here"
            )
        tensors |= header
    return tensors


def _no_weights(directory: Path) -> str:
    others = [
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.gguf")
        for path in sorted(directory.glob(pattern))
    ]
    if any(name.startswith(("experts-", "dense-")) for name in others):
        return f"{directory}: a conversion that was not finished: no {MANIFEST}; run it again"
    found = f"found only {_listed(others)}" if others else "found no weights"
    return (
        f"{directory}: wanted {INDEX_NAME} or model*.safetensors, {found}{_leftovers(directory)};"
        " fetch the safetensors files of this model"
    )


def _leftovers(directory: Path) -> str:
    """Name what an interrupted download left behind."""
    names = sorted(path.name for pattern in _LEFTOVERS for path in directory.glob(pattern))
    return f" (unfinished downloads: {_listed(names)})" if names else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(shown, names[:_LISTED])) + more


def check_directory(directory: Path) -> None:
    """Refuse what is no directory.

    Raises:
        CheckpointError: it is none.
    """
    if not directory.is_dir():
        problem = "not a directory" if directory.exists() else "there is no such directory"
        raise CheckpointError(f"{directory}: {problem}; name the folder of a checkpoint")
