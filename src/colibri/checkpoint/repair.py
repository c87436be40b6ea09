"""Makes damaged parts of a container anew from its source, and nothing else.

What is made must have the checksums that `colibri.json` names; before it has, no file is touched
but a record that is damaged already. A missing or broken manifest cannot be repaired.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from colibri.checkpoint.container_checks import read_records
from colibri.checkpoint.container_file import PlannedFile
from colibri.checkpoint.container_manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    checksum_tensor,
    layer_file,
)
from colibri.checkpoint.container_writer import (
    alone,
    dense_entry,
    dense_file,
    record_entry,
)
from colibri.checkpoint.conversion import Conversion
from colibri.checkpoint.convert import in_order
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.experts import ExpertLayerLayout
from colibri.checkpoint.importance import LayerImportance
from colibri.checkpoint.recode import DenseParameter, Record, expert_record
from colibri.checkpoint.safetensors import TensorSpec, read_header, read_tensor
from colibri.checkpoint.safetensors_writer import Entry
from colibri.checkpoint.writing import write_errors
from colibri.errors import CheckpointError
from colibri.formats import Bytes
from colibri.kernels.cpus import num_threads

_TABLES = "crc32c."


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was made anew.

    Attributes:
        records: experts, as (layer, expert), that were written into files that are there.
        files: names of files that were written whole.
    """

    records: tuple[tuple[int, int], ...]
    files: tuple[str, ...]


def repair(
    conversion: Conversion,
    directory: Path,
    manifest: Manifest,
    progress: Callable[[int, int], None] | None = None,
) -> Repaired:
    """Make what is damaged in `directory` anew.

    Args:
        conversion: of the container's source, to the formats that the manifest names.
        directory: the container.
        manifest: its `colibri.json`.
        progress: told files that were looked at, and all of them.

    Raises:
        CheckpointError: the source gives other bytes than the container had, or another conversion
            is at work there.
        WriteError: the disk is full or fails.
    """
    work = _Repair(conversion, directory, manifest)
    with write_errors(directory), alone(directory):
        for done, name in enumerate(work.order()):
            if progress is not None:
                progress(done, len(manifest.files))
            work.look_at(name)
        work.write_dense()
    return Repaired(tuple(work.records), tuple(work.files))


class _Repair:
    def __init__(self, conversion: Conversion, directory: Path, manifest: Manifest) -> None:
        self.conversion, self.directory, self.manifest = conversion, directory, manifest
        self.records: list[tuple[int, int]] = []
        self.files: list[str] = []
        pairs = zip(conversion.index.layers, conversion.layouts, strict=True)
        self._layers = {layer_file(layer.layer): (layer, layout) for layer, layout in pairs}
        self._missing_dense: list[str] = []
        self._tables = self._find_tables()

    def order(self) -> list[str]:
        """Files of experts first: their checksums can be made from them."""
        return sorted(self.manifest.files, key=lambda name: (name not in self._layers, name))

    def look_at(self, name: str) -> None:
        """Repair a file of experts, or note a dense one."""
        if self._is_whole(name):
            return
        if name not in self._layers:
            self._missing_dense.append(name)
        elif not self._mend_records(name):
            self._write_layer(name)

    def _is_whole(self, name: str) -> bool:
        path, wanted = self.directory / name, self.manifest.files[name]
        if not path.is_file() or path.stat().st_size != wanted.nbytes:
            return False
        return FileRecord.of(path) == wanted

    def _find_tables(self) -> Mapping[int, list[int]]:
        """The checksums of records, where their file is whole."""
        for name in sorted(self.manifest.files, reverse=True):
            if name not in self._layers and self._is_whole(name):
                header = read_header(self.directory / name)
                if all(each.startswith(_TABLES) for each in header):
                    return {
                        int(each.removeprefix(_TABLES)): read_tensor(spec).view("<u4").tolist()
                        for each, spec in header.items()
                    }
        return {}

    def _mend_records(self, name: str) -> bool:
        """Whether the file is whole once its damaged records are written anew."""
        layer, layout = self._layers[name]
        checksums = self._tables.get(layer.layer)
        path = self.directory / name
        try:
            specs = read_records(path, layer.layer, layer.num_experts, layout)
        except CheckpointError:  # the header is damaged, or the file is cut
            return False
        if checksums is None:
            return False
        for expert, (spec, wanted) in enumerate(zip(specs, checksums, strict=True)):
            if crc32c(read_tensor(spec)) != wanted:
                self._put_record(spec, self._made(layer, expert, wanted))
                self.records.append((layer.layer, expert))
        return self._is_whole(name)

    def _made(self, layer: ExpertLayerLayout, expert: int, wanted: int) -> Record:
        _, layout = self._layers[layer_file(layer.layer)]
        record = expert_record(self.conversion.index, layer, layout, expert, self._of(layer))
        if record.checksum != wanted:
            raise CheckpointError(
                f"{self.directory}: expert {expert} of layer {layer.layer} made anew has other"
                f" bytes than {MANIFEST} names: this is not the source that it was converted from,"
                " or not the importance; convert into an empty directory"
            )
        return record

    def _of(self, layer: ExpertLayerLayout) -> LayerImportance | None:
        return self.conversion.importance.get(layer.layer)

    def _put_record(self, spec: TensorSpec, record: Record) -> None:
        with spec.file.open("r+b", buffering=0) as file:
            file.seek(spec.offset)
            view = memoryview(record.data.data).cast("B")
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def _write_layer(self, name: str) -> None:
        """The whole file."""
        layer, layout = self._layers[name]
        count = layer.num_experts
        entries = [record_entry(layer.layer, expert, layout.nbytes) for expert in range(count)]
        tasks = (
            partial(expert_record, self.conversion.index, layer, layout, expert, self._of(layer))
            for expert in range(count)
        )
        self._write(name, entries, (each.data for each in in_order(tasks, num_threads())))

    def _write(self, name: str, entries: list[Entry], data: Iterator[Bytes]) -> None:
        file = PlannedFile(self.directory / name, entries, self.manifest.files[name])
        try:
            for each in data:
                file.add(each)
            file.close()
        except BaseException:
            file.discard()
            raise
        self.files.append(name)

    def write_dense(self) -> None:
        """Dense files that are missing or damaged, and that of checksums."""
        missing = sorted(self._missing_dense)
        if missing and not self._tables and self.manifest.layouts:
            self._write_tables(missing.pop())  # it was written last
        if not missing:
            return
        here: set[str] = set()
        for name in self.manifest.files:
            if name not in self._layers and name not in missing:
                here |= read_header(self.directory / name).keys()
        left = deque(each for each in self.conversion.dense if each.name not in here)
        for name in missing:
            self._write_dense_file(name, left)

    def _write_dense_file(self, name: str, left: deque[DenseParameter]) -> None:
        """As many of the tensors that are left as the file takes."""
        file = dense_file(self.directory / name, self.manifest.files[name])
        try:
            while left and file.has_room(entry := _entry(left[0])):
                file.add(entry, (piece() for piece in left.popleft().pieces()))
            file.close()
        except BaseException:
            file.discard()
            raise
        self.files.append(name)

    def _write_tables(self, name: str) -> None:
        tables = {}
        for layer, layout in self._layers.values():
            path = self.directory / layer_file(layer.layer)
            specs = read_records(path, layer.layer, layer.num_experts, layout)
            sums = [crc32c(read_tensor(spec)) for spec in specs]
            tables[layer.layer] = np.asarray(sums, "<u4")
        entries = [Entry(checksum_tensor(n), "U32", t.shape, t.nbytes) for n, t in tables.items()]
        self._write(name, entries, (table.view(np.uint8) for table in tables.values()))


def _entry(parameter: DenseParameter) -> Entry:
    return dense_entry(parameter.name, parameter.format, parameter.shape, parameter.nbytes)
