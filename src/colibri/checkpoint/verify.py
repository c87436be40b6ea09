"""Holds the contents of a container against its checksums; every file is read once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri.checkpoint.container import Container
from colibri.checkpoint.container_manifest import layer_file
from colibri.checkpoint.crc32c import crc32c
from colibri.errors import CheckpointError
from colibri.formats import Bytes

_PIECE_BYTES = 4 << 20
_MOST_TOLD = 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read and found to agree.

    Attributes:
        num_files: safetensors files.
        nbytes: bytes in them.
        num_records: experts whose checksum was compared.
    """

    num_files: int
    nbytes: int
    num_records: int


def verify_container(
    container: Container, progress: Callable[[int, int], None] | None = None
) -> Verified:
    """Compare each file's SHA-256 and each record's CRC-32C with what was written.

    Args:
        container: an opened container, whose sizes and headers agree already.
        progress: told bytes done and bytes in all.

    Raises:
        CheckpointError: names the files, and where there are the experts, that are damaged.
    """
    damages: list[str] = []
    files = container.manifest.files
    layers = {layer_file(layer): layer for layer in container.records}
    done, total = 0, sum(record.nbytes for record in files.values())
    for name, wanted in files.items():
        known = len(damages)
        digest = hashlib.sha256()
        for piece in (
            _checked(container, layers[name], damages)
            if name in layers
            else _plain(container.directory / name)
        ):
            digest.update(piece.data)
            done += piece.nbytes
            if progress is not None:
                progress(done, total)
        if digest.hexdigest() != wanted.sha256 and len(damages) == known:
            damages.append(
                f"{container.directory / name}: wanted SHA-256 {wanted.sha256}, found"
                f" {digest.hexdigest()}"
            )
    if damages:
        raise CheckpointError(_told(damages))
    records = sum(len(records) for records in container.records.values())
    return Verified(len(files), total, records)


def _told(damages: list[str]) -> str:
    """One damage in a line; of several the first, below one another."""
    if len(damages) == 1:
        return f"{damages[0]}: the file is damaged; fetch it again or convert again"
    more = len(damages) - _MOST_TOLD
    lines = [*damages[:_MOST_TOLD], *([f"and {more:,} more"] if more > 0 else [])]
    head = f"{len(damages):,} damages; fetch these files again or convert again:"
    return "\n  ".join([head, *lines])


def _plain(path: Path) -> Iterator[Bytes]:
    """A file piece by piece."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield np.frombuffer(piece, np.uint8)


def _checked(container: Container, layer: int, damages: list[str]) -> Iterator[Bytes]:
    """A layer's file: its header, then record by record, each compared with its checksum."""
    path, specs = container.directory / layer_file(layer), container.records[layer]
    checksums = container.read_checksums(layer).tolist()
    with path.open("rb") as file:
        yield np.frombuffer(file.read(specs[0].offset), np.uint8)
        for expert, (spec, wanted) in enumerate(zip(specs, checksums, strict=True)):
            record = np.frombuffer(file.read(spec.nbytes), np.uint8)
            found = crc32c(record)
            if found != wanted:
                damages.append(
                    f"{path}: layer {layer}, expert {expert}: wanted CRC-32C {wanted:08x}, found"
                    f" {found:08x}"
                )
            yield record
