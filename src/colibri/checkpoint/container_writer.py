"""Writes a container: one expert in memory at a time, and nothing looks complete before it is.

Files are written under `.part` names and renamed once they are on the disk. What is finished is
kept in a progress file, so that a writer of the same source goes on where a killed one stopped;
`colibri.json` comes last. The form of a container is described in `container`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.container_file import GrowingFile, PlannedFile
from colibri.checkpoint.container_manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    checksum_tensor,
    dense_from_json,
    dense_json,
    expert_tensor,
    layer_file,
)
from colibri.checkpoint.container_progress import Progress
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.directory_lock import DirectoryLock
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors_writer import DTYPE_OF_FORMAT, Entry, write_json
from colibri.errors import CheckpointError
from colibri.formats import Bytes, FloatFormat, Floats, Format
from colibri.units import format_bytes

_DENSE_FILE_BYTES = 5_000_000_000
# A dense file's tensors are not known when it is begun: its header gets this much room.
_DENSE_HEADER_ROOM = 64 << 10


class LayerWriter:
    """The experts of one layer, to be added in ascending order."""

    def __init__(self, file: PlannedFile, layout: RecordLayout) -> None:
        self.layout = layout
        self.checksums: list[int] = []
        self._file, self._record = file, np.zeros(layout.nbytes, np.uint8)

    def add(self, expert: int, gate: Floats, up: Floats, down: Floats, *biases: Floats) -> None:
        """Round and append an expert: gate and up `[F, D]`, down `[D, F]`, and biases if any.

        Raises:
            NumericsError: a weight is not finite and the format has no code for it.
        """
        found = []
        for part, matrix in zip(self.layout.parts, (gate, up, down), strict=True):
            if matrix.shape != (part.rows, part.columns):
                raise ValueError(f"{part.name} is {matrix.shape}, not {(part.rows, part.columns)}")
            found.append(_resident(matrix, part.format))
        self.add_resident(expert, *found, *(bias.view(np.uint8) for bias in biases))

    def add_resident(self, expert: int, *parts: Bytes) -> None:
        """Append an expert whose gate, up and down (then biases) are coded and packed already."""
        record = self.layout.assemble(*parts, out=self._record)
        self.add_record(expert, record, crc32c(record))

    def add_record(self, expert: int, record: Bytes, checksum: int) -> None:
        """Append an expert that is laid out already, with the CRC-32C of its record."""
        if expert != len(self.checksums):
            raise ValueError(f"expert {expert} follows {len(self.checksums) - 1}: not ascending")
        self.checksums.append(checksum)
        self._file.add(record)


class ContainerWriter:
    """Writes one container; see the module for what a kill leaves behind.

    As a context manager it closes what is open when the block fails; only `finish` completes.

    Args:
        directory: made if need be; empty, or left by a killed writer of the same `source`.
        family: the model_type of the configuration.
        source: what is written and how, in names and text.
        revision: what else tells this source from another; it is not recorded in the container.
            A writer that resumes must be given the same family, source and revision.

    Raises:
        CheckpointError: the directory holds anything else, or another writer is at work in it.
    """

    def __init__(
        self, directory: Path, *, family: str, source: Mapping[str, str], revision: str = ""
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lock = alone(directory)
        self._progress = Progress.begin(
            directory, {"family": family, "source": dict(source), "revision": revision}
        )
        self._dense: GrowingFile | None = None
        self._dense_info: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dense is not None:
            self._dense.discard()
            self._dense, self._dense_info = None, {}
        self._lock.release()

    def has_layer(self, layer: int, num_experts: int, layout: RecordLayout) -> bool:
        """Whether an earlier writer finished this layer in this form."""
        done = self._progress.files.get(layer_file(layer), {})
        wanted = {"parts": layout.to_json(), "num_experts": num_experts}
        return bool(done) and all(done[key] == value for key, value in wanted.items())

    @contextmanager
    def layer(self, layer: int, num_experts: int, layout: RecordLayout) -> Iterator[LayerWriter]:
        """Write one MoE layer; every expert must have been added when the block ends."""
        entries = [record_entry(layer, expert, layout.nbytes) for expert in range(num_experts)]
        file = PlannedFile(self.directory / layer_file(layer), entries)
        writer = LayerWriter(file, layout)
        try:
            yield writer
            if len(writer.checksums) != num_experts:
                added = len(writer.checksums)
                raise ValueError(f"layer {layer}: {added} of {num_experts} experts were added")
        except BaseException:
            file.discard()
            raise
        about = {"layer": layer, "num_experts": num_experts, "parts": layout.to_json()}
        about |= {"crc32c": writer.checksums}
        self._progress.add(file.path, file.close().to_json() | about)

    def has_dense(self, name: str) -> bool:
        """Whether an earlier writer, or this one, has written this tensor."""
        return name in self._dense_info or name in self._progress.dense()

    def dense(self, name: str, values: NDArray[np.float32], fmt: Format) -> None:
        """Round and append a resident tensor; coded formats take matrices `[N, K]` only."""
        if not fmt.is_plain:
            data = _resident(values, fmt)
        else:
            assert isinstance(fmt, FloatFormat)
            items = np.ascontiguousarray(fmt.from_float32(values))
            data = items.reshape(-1).view(np.uint8)
        self.dense_resident(name, data, fmt, values.shape)

    def dense_resident(self, name: str, data: Bytes, fmt: Format, shape: Sequence[int]) -> None:
        """Append a tensor whose bytes are resident already: a coded matrix, or plain floats."""
        self.dense_pieces(name, [np.ascontiguousarray(data)], data.nbytes, fmt, shape)

    def dense_pieces(
        self, name: str, data: Iterable[Bytes], nbytes: int, fmt: Format, shape: Sequence[int]
    ) -> None:
        """The same of bytes that come in pieces, `nbytes` in all."""
        if self.has_dense(name):
            raise ValueError(f"{name} was written before")
        entry = dense_entry(name, fmt, shape, nbytes)
        if self._dense is not None and not self._dense.has_room(entry):
            self._close_dense()
        if self._dense is None:
            self._dense = dense_file(self._progress.next_dense())
        self._dense.add(entry, data)
        self._dense_info[name] = dense_json(fmt, shape)

    def finish(
        self,
        config: Mapping[str, Any],
        files: Iterable[Path] = (),
        documents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write what is open, config.json and checksums, copy `files`, then make it a container.

        `documents` are further files, by name.
        """
        self._close_dense()
        checksums = self._write_checksums()
        write_json(self.directory / "config.json", dict(config))
        for path in files:
            shutil.copyfile(path, self.directory / path.name)
        for name, data in documents.items():
            (self.directory / name).write_bytes(data)
        write_json(self.directory / MANIFEST, self._manifest(checksums).to_json())
        self._progress.end()
        self._lock.release()

    def _close_dense(self) -> None:
        if self._dense is not None:
            record = self._dense.close()
            self._progress.add(self._dense.path, record.to_json() | {"dense": self._dense_info})
            self._dense, self._dense_info = None, {}

    def _write_checksums(self) -> dict[str, FileRecord]:
        """The checksum tables, in a file that no progress remembers: they must fit the layers."""
        tables = {
            done["layer"]: np.asarray(done["crc32c"], "<u4") for done in self._progress.layers()
        }
        if not tables:
            return {}
        entries = [
            Entry(checksum_tensor(layer), "U32", table.shape, table.nbytes)
            for layer, table in tables.items()
        ]
        file = PlannedFile(self._progress.next_dense(), entries)
        for table in tables.values():
            file.add(table.view(np.uint8))
        return {file.path.name: file.close()}

    def _manifest(self, checksums: Mapping[str, FileRecord]) -> Manifest:
        """`colibri.json`."""
        layers, files = self._progress.layers(), self._progress.files
        return Manifest(
            family=self._progress.identity["family"],
            source=self._progress.identity["source"],
            num_experts={done["layer"]: done["num_experts"] for done in layers},
            layouts={done["layer"]: RecordLayout.from_json(done["parts"]) for done in layers},
            dense={name: dense_from_json(about) for name, about in self._progress.dense().items()},
            files={name: FileRecord(f["bytes"], f["sha256"]) for name, f in files.items()}
            | dict(checksums),
        )


def alone(directory: Path) -> DirectoryLock:
    """Keep other writers out; raises CheckpointError where one is at work."""
    try:
        return DirectoryLock(directory, wait=False)
    except BlockingIOError:
        raise CheckpointError(
            f"{directory}: another conversion is writing here:"
            " wait for it, or name another directory"
        ) from None


def dense_file(path: Path, wanted: FileRecord | None = None) -> GrowingFile:
    """A file for dense tensors."""
    return GrowingFile(
        path, header_room=_DENSE_HEADER_ROOM, max_nbytes=_DENSE_FILE_BYTES, wanted=wanted
    )


def record_entry(layer: int, expert: int, nbytes: int) -> Entry:
    """The header's entry of an expert."""
    return Entry(expert_tensor(layer, expert), "U8", (nbytes,), nbytes)


def dense_entry(name: str, fmt: Format, shape: Sequence[int], nbytes: int) -> Entry:
    """The header's entry of a dense tensor."""
    if not fmt.is_plain:
        return Entry(name, "U8", (nbytes,), nbytes)
    return Entry(name, DTYPE_OF_FORMAT[fmt.name], tuple(shape), nbytes)


def _resident(matrix: Floats, fmt: Format) -> Bytes:
    """A matrix rounded and packed."""
    rows, columns = matrix.shape
    return fmt.pack(fmt.encode(matrix), (rows, columns))


def require_directory(directory: Path) -> None:
    """Refuse a place where no directory can be written.

    Raises:
        CheckpointError: `directory`, or the nearest above it that exists, is a file, a link to
            nothing, or not to be written to.
    """
    for path in (directory, *directory.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path}: is a link to nothing: name a directory")
        if path.exists():
            if not path.is_dir():
                raise CheckpointError(f"{path}: is a file: name a directory")
            if not os.access(path, os.W_OK | os.X_OK):
                raise CheckpointError(
                    f"{path}: cannot be written to: name a directory that can, or give leave"
                )
            return


def require_free(directory: Path, nbytes: int) -> None:
    """Refuse to begin what the disk cannot hold; finished files of a killed writer count as done.

    Raises:
        CheckpointError: fewer bytes are free on the disk where `directory` is or will be.
    """
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    needed = nbytes - sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if needed > free:
        raise CheckpointError(
            f"{directory}: needs {format_bytes(needed)}, but only {format_bytes(free)} are free;"
            f" make room for {format_bytes(needed - free)} more or name another disk"
        )
