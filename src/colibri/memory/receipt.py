"""What a partial mirror says of itself, in `colibri-mirror.json`.

A partial mirror has the names and lengths of the model's files, but is sparse: only the records
that the receipt lists are there. The receipt is replaced whole and last, so it never promises what
is not on the drive.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.container_manifest import MANIFEST
from colibri.checkpoint.experts import ExpertIndex
from colibri.checkpoint.strict_json import read_object
from colibri.errors import CheckpointError

RECEIPT = "colibri-mirror.json"
_VERSION = 1
_SIZE_LIMIT = 64 << 20
_HEAD, _TAIL = 64 << 10, 4 << 10  # bytes of a file that are hashed: its header and some weights


@dataclass(frozen=True, slots=True)
class Source:
    """The model's files as they were when records were copied.

    Attributes:
        files: length, and a digest of the first 64 KiB and last 4 KiB, by name.
        manifest: SHA-256 of `colibri.json`, empty where there is none.
    """

    files: Mapping[str, tuple[int, str]]
    manifest: str

    @classmethod
    def of(cls, index: ExpertIndex) -> Self:
        """Look at the files that hold records.

        Raises:
            CheckpointError: one cannot be read.
        """
        try:
            files = {path.name: (path.stat().st_size, edges_digest(path)) for path in index.files}
            beside = [path.parent / MANIFEST for path in index.files[:1]]
            found = [path.read_bytes() for path in beside if path.exists()]
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
        return cls(files, hashlib.sha256(found[0]).hexdigest() if found else "")


def edges_digest(path: Path) -> str:
    """SHA-256 of a file's first 64 KiB and last 4 KiB; raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD))
        file.seek(max(0, path.stat().st_size - _TAIL))
        digest.update(file.read(_TAIL))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """Which records are there.

    Attributes:
        source: what they were copied from.
        present: `[M * E]` whether each record is there.
        crcs: `[M * E]` CRC-32C of those.
    """

    source: Source
    present: NDArray[np.bool_]
    crcs: NDArray[np.uint32]

    @classmethod
    def empty(cls, index: ExpertIndex) -> Self:
        """No records of this model."""
        size = index.file.shape[0] * index.file.shape[1]
        return cls(Source.of(index), np.zeros(size, bool), np.zeros(size, np.uint32))

    @classmethod
    def read(cls, directory: Path, index: ExpertIndex) -> Self:
        """Read and check a receipt against the model.

        Raises:
            CheckpointError: broken, of another version, or of another model.
        """
        path = directory / RECEIPT
        value = read_object(path, _SIZE_LIMIT)
        if value.get("version") != _VERSION:
            raise CheckpointError(
                f"{path}: version {value.get('version')!r}; this release reads {_VERSION}: stage "
                "the mirror again, in an empty directory"
            )
        try:
            files = {name: (int(n), str(digest)) for name, (n, digest) in value["files"].items()}
            source = Source(files, str(value["manifest"]))
            present, crcs = _records(value["records"], index)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"{path}: broken ({error}): stage the mirror again, in an empty directory"
            ) from None
        if source != Source.of(index):
            raise CheckpointError(
                f"{path}: was written for other files than those in {index.files[0].parent} now: "
                "stage the mirror again, in an empty directory"
            )
        return cls(source, present, crcs)

    def write(self, directory: Path, index: ExpertIndex) -> None:
        """Replace the directory's receipt; what it lists must be on the drive already."""
        experts = index.file.shape[1]
        records: dict[str, Any] = {}
        for row, layout in enumerate(index.layers):
            cell = slice(row * experts, (row + 1) * experts)
            ids = np.flatnonzero(self.present[cell])
            if len(ids):
                crcs = self.crcs[cell][ids].tolist()
                records[str(layout.layer)] = {"experts": ids.tolist(), "crc32c": crcs}
        files = {name: list(about) for name, about in self.source.files.items()}
        value = {"version": _VERSION, "files": files, "manifest": self.source.manifest}
        write_atomically(directory / RECEIPT, json.dumps({**value, "records": records}) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside `path`, make it safe on the drive, and put it in its place."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _records(
    value: Mapping[str, Any], index: ExpertIndex
) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    shape = index.file.shape[:2]
    present, crcs = np.zeros(shape, bool), np.zeros(shape, np.uint32)
    for layer, about in value.items():
        row = index.position[int(layer)]
        experts, sums = np.array(about["experts"], np.int64), np.array(about["crc32c"], np.uint32)
        if experts.shape != sums.shape or experts.ndim != 1:
            raise ValueError(f"layer {layer}: there are not as many checksums as experts")
        if len(experts) and not 0 <= experts.min() <= experts.max() < index.layers[row].num_experts:
            raise ValueError(f"layer {layer}: an expert that the model does not have")
        present[row, experts], crcs[row, experts] = True, sums
    return present.reshape(-1), crcs.reshape(-1)
