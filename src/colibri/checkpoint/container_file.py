"""One file of a container while it is written: under a `.part` name until it is on the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from colibri.checkpoint.container_manifest import FileRecord
from colibri.checkpoint.experts import PAGE
from colibri.checkpoint.safetensors_writer import Entry, encode_header
from colibri.errors import CheckpointError
from colibri.formats import Bytes

_SYNC_BYTES = 64 << 20  # between two requests to write to the disk
_OFFSET_DIGITS = 40  # what data_offsets may add to an entry that was measured on its own


class PartFile:
    """A file that gets its name when it is complete.

    What is written goes to the disk while more is made: a thread asks for that now and then, so
    that neither memory fills with it nor the end has to wait for all of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._out = self._part.open("wb", buffering=0)
        self._unsynced, self._syncing = 0, ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None

    def discard(self) -> None:
        """Give the file up."""
        self._syncing.shutdown()
        self._out.close()
        self._part.unlink(missing_ok=True)

    def _put(self, data: Bytes) -> None:
        """Write all of it, and let it go to the disk."""
        view = memoryview(data.data).cast("B")
        while view:
            view = view[self._out.write(view) :]
        self._unsynced += data.nbytes
        if self._unsynced >= _SYNC_BYTES and (self._synced is None or self._synced.done()):
            if self._synced is not None:
                self._synced.result()
            self._unsynced, self._synced = 0, self._syncing.submit(os.fdatasync, self._out.fileno())

    def _publish(self, record: FileRecord, wanted: FileRecord | None) -> FileRecord:
        """Flush to the disk, then rename, where the file is as it is wanted."""
        if wanted is not None and record != wanted:
            raise CheckpointError(
                f"{self.path}: made anew it has the SHA-256 {record.sha256}, wanted"
                f" {wanted.sha256}: this is not the source that it was converted from, or not the"
                " importance; convert into an empty directory"
            )
        self._syncing.shutdown()
        os.fsync(self._out.fileno())
        self._out.close()
        self._part.rename(self.path)
        return record


class PlannedFile(PartFile):
    """A file whose tensors are known beforehand; it is hashed as it is written.

    Where the result is known too, it is `wanted`, and nothing else gets the name.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], wanted: FileRecord | None = None
    ) -> None:
        super().__init__(path)
        self._wanted = wanted
        self._digest = hashlib.sha256()
        self._left = list(reversed(entries))
        try:
            self._write(np.frombuffer(encode_header(entries, align=PAGE), np.uint8))
        except BaseException:
            self.discard()
            raise

    def add(self, data: Bytes) -> None:
        """Write the next tensor's contiguous bytes."""
        entry = self._left.pop()
        if data.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name} has {data.nbytes} bytes, not {entry.nbytes}")
        self._write(data)

    def close(self) -> FileRecord:
        """Complete the file; raises CheckpointError where it is not as it is wanted."""
        if self._left:
            raise ValueError(f"{self.path}: {len(self._left)} tensors have not been written")
        record = FileRecord(self._out.tell(), self._digest.hexdigest())
        return self._publish(record, self._wanted)

    def _write(self, data: Bytes) -> None:
        self._put(data)
        self._digest.update(data.data)


class GrowingFile(PartFile):
    """A file that takes tensors until it is full; its header gets a fixed room at the start."""

    def __init__(
        self, path: Path, *, header_room: int, max_nbytes: int, wanted: FileRecord | None = None
    ) -> None:
        super().__init__(path)
        self._wanted = wanted
        self._entries: list[Entry] = []
        self._room, self._max_nbytes = header_room, max_nbytes
        self._header_nbytes, self._nbytes = len(encode_header([])), 0
        self._out.seek(header_room)

    def has_room(self, entry: Entry) -> bool:
        """Whether the tensor fits; the first one always does."""
        fits = self._nbytes + entry.nbytes <= self._max_nbytes
        fits &= self._header_nbytes + _header_nbytes(entry) <= self._room
        return fits or not self._entries

    def add(self, entry: Entry, data: Iterable[Bytes]) -> None:
        """Append a tensor's contiguous bytes, which come in pieces."""
        written = 0
        for piece in data:
            self._put(piece)
            written += piece.nbytes
        if written != entry.nbytes:
            raise ValueError(f"{entry.name} has {written} bytes, not {entry.nbytes}")
        self._entries.append(entry)
        self._nbytes += entry.nbytes
        self._header_nbytes += _header_nbytes(entry)

    def close(self) -> FileRecord:
        """Write the header, read the file once for its hash, complete it.

        Raises:
            CheckpointError: it is not as it is wanted.
        """
        header = encode_header(self._entries, align=PAGE, room=self._room)
        if len(header) != self._room:
            raise ValueError(f"{self.path}: the header needs {len(header)} bytes")
        self._out.seek(0)
        self._put(np.frombuffer(header, np.uint8))
        return self._publish(FileRecord.of(self._part), self._wanted)


def _header_nbytes(entry: Entry) -> int:
    """A bound on what the tensor adds to a header."""
    return len(encode_header([entry])) + _OFFSET_DIGITS
