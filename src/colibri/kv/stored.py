"""Attention state on disk, shared by all conversations of one model that begin alike.

A directory holds two kinds of files, named by a hash of all ids up to their end:

    NAME.block        64 positions of all layers
    NAME-TAIL.tail    what follows the block NAME: fewer than 64 ids, their block, and the cell of
                      recurrent state behind them

Each is a head, ids, bytes; the head has their CRC-32C. Files are written beside and renamed, never
changed: whatever is killed when, each is whole or not there. Nothing is synced: what is left of one
after a loss of power is told by its checksum. The least recently used ones go when there are too
many bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.crc32c import crc32c
from colibri.formats import Bytes
from colibri.kernels.api import KV_BLOCK, Ints

BLOCK, TAIL = ".block", ".tail"
_MAGIC = b"COLIKV01"
_HEAD = struct.Struct("<8sIIQ")  # magic, number of ids, CRC-32C of ids and bytes, number of bytes
_DIGEST_BYTES = 16
_BESIDE = ".part-"
_ABANDONED_S = 3600


class Stored(NamedTuple):
    """A beginning of some ids that is on disk.

    Attributes:
        length: how many ids.
        blocks: files of whole blocks, in order.
        tail: the file of what follows them.
    """

    length: int
    blocks: tuple[Path, ...]
    tail: Path | None

    @property
    def num_files(self) -> int:
        """Of blocks and tail."""
        return len(self.blocks) + (self.tail is not None)


class WritableState(Protocol):
    """Where stored state is read into; see `KVState`."""

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a cell."""

    def block(self, index: int) -> Bytes:
        """What is kept of 64 positions."""

    def cells(self) -> Mapping[int, Bytes | None]:
        """Its cell, by length."""

    def seal(self) -> None:
        """Its cell was written by others."""


class StoredStates:
    """The files of one model under one set of settings; safe to use from several threads.

    Args:
        directory: of these files alone.
        recurrent: whether states have cells, so that they can go on from a tail's end only.
        most_bytes: of all files.

    Attributes:
        num_bytes: of all files now.
    """

    def __init__(self, directory: Path, recurrent: bool, most_bytes: int) -> None:
        """Take stock; raises OSError where the directory cannot be used."""
        self._directory, self._recurrent, self._most_bytes = directory, recurrent, most_bytes
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = [path for path in directory.iterdir() if path.suffix in (BLOCK, TAIL)]
        for path in directory.glob(f"{_BESIDE}*"):  # of whoever was killed while writing
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        self._files: dict[str, int] = {}  # the least recently used first, with their bytes
        self._tails: dict[str, dict[str, None]] = {}  # of the block that they follow
        self.num_bytes = 0
        for path in found:
            self._add(path.name, path.stat().st_size)

    def find(self, ids: Ints) -> Stored | None:
        """The longest beginning of `ids [T]` that is there."""
        names = [name for name, _ in _prefixes(ids)]
        with self._lock:
            whole = next(
                (i for i, name in enumerate(names[1:]) if f"{name}{BLOCK}" not in self._files),
                len(names) - 1,
            )
            tails = [tuple(self._tails.get(name, ())) for name in names[: whole + 1]]
        paths = tuple(self._directory / f"{name}{BLOCK}" for name in names[1 : whole + 1])
        for blocks in range(whole, -1 if self._recurrent else whole - 1, -1):
            tail = self._best_tail(tails[blocks], ids[blocks * KV_BLOCK :])
            if tail is not None:
                length, path = tail
                return Stored(blocks * KV_BLOCK + length, paths[:blocks], path)
        usable = 0 if self._recurrent else whole
        return Stored(usable * KV_BLOCK, paths[:usable], None) if usable else None

    def _best_tail(self, tails: Sequence[str], ids: Ints) -> tuple[int, Path] | None:
        """The file that most of the beginning of `ids` can be taken from."""
        best: tuple[int, Path] | None = None
        for name in tails:
            path = self._directory / name
            stored = _ids_of(path)
            if stored is None:
                continue
            same = common_length(stored, ids)
            if self._recurrent and same < len(stored):
                continue
            if (self._recurrent or same) and (best is None or same > best[0]):
                best = same, path
        return best

    def load(self, stored: Stored, index: int, state: WritableState) -> Path | None:
        """Read a file, the blocks first, into a state that has room; return it if it is broken.

        A broken file is removed.
        """
        if index < len(stored.blocks):
            path, parts = stored.blocks[index], [state.block(index)]
        else:
            assert stored.tail is not None
            path = stored.tail
            parts = [state.block(index)] if stored.length % KV_BLOCK else []
            state.seal()
            parts += [cell for cell in (state.cells()[stored.length],) if cell is not None]
        return None if self._read(path, parts) else path

    def _read(self, path: Path, targets: Sequence[Bytes]) -> bool:
        try:
            with path.open("rb") as file:
                ids, checksum, nbytes = _head(file.read(_HEAD.size), path)
                found = crc32c(np.frombuffer(file.read(4 * ids), np.uint8))
                if nbytes != sum(target.nbytes for target in targets):
                    raise ValueError(path)
                for target in targets:
                    if file.readinto(target.data) != target.nbytes:
                        raise ValueError(path)
                    found = crc32c(target, found)
                if found != checksum:
                    raise ValueError(path)
        except (OSError, ValueError):
            self._remove(path.name)
            return False
        return self._touch(path.name)

    def missing(self, ids: Ints, lengths: Sequence[int]) -> Iterator[tuple[int, Path]]:
        """Files that are not there, by the length at whose end they stand.

        Those of whole blocks of `ids [T]`, then the tails at `lengths`.
        """
        names = []
        for name, end in _prefixes(ids):
            names.append(name)
            if end and not self._touch(f"{name}{BLOCK}"):
                yield end, self._directory / f"{name}{BLOCK}"
        for length in lengths:
            if length % KV_BLOCK or self._recurrent:
                whole = length // KV_BLOCK
                tail = _hash(b"tail", ids[whole * KV_BLOCK : length])
                name = f"{names[whole]}-{tail}{TAIL}"
                if not self._touch(name):
                    yield length, self._directory / name

    def write(self, path: Path, ids: Ints, parts: Sequence[Bytes]) -> None:
        """Add a file, then remove old ones if there are too many bytes; raises OSError."""
        head = ids.astype("<i4").view(np.uint8)
        checksum = crc32c(head)
        for part in parts:
            checksum = crc32c(part, checksum)
        nbytes = sum(part.nbytes for part in parts)
        with tempfile.NamedTemporaryFile(prefix=_BESIDE, dir=self._directory, delete=False) as file:
            beside = Path(file.name)
            try:
                file.write(_HEAD.pack(_MAGIC, len(ids), checksum, nbytes))
                for piece in (head, *parts):
                    file.write(piece.data)
                file.close()
                beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        with self._lock:
            self._add(path.name, _HEAD.size + head.nbytes + nbytes)
        while self.num_bytes > self._most_bytes and len(self._files) > 1:
            self._remove(next(iter(self._files)))

    def _touch(self, name: str) -> bool:
        """Whether a file is there; it counts as used then."""
        with self._lock:
            if name not in self._files:
                return False
            self._files[name] = self._files.pop(name)
        try:
            os.utime(self._directory / name)
        except OSError:
            self._remove(name)
            return False
        return True

    def _add(self, name: str, nbytes: int) -> None:
        self._files[name] = nbytes
        self.num_bytes += nbytes
        if name.endswith(TAIL):
            self._tails.setdefault(_follows(name), {})[name] = None

    def _remove(self, name: str) -> None:
        with self._lock:
            self.num_bytes -= self._files.pop(name, 0)
            tails = self._tails.get(_follows(name), {})
            tails.pop(name, None)
            if not tails:
                self._tails.pop(_follows(name), None)
        (self._directory / name).unlink(missing_ok=True)


def _follows(name: str) -> str:
    """The block that a tail follows, by its file's name."""
    return name.partition("-")[0]


def _prefixes(ids: Ints) -> Iterator[tuple[str, int]]:
    """Name and length of nothing, and of every whole number of blocks of `ids`."""
    name = _hash(_MAGIC, ids[:0])
    yield name, 0
    for end in range(KV_BLOCK, len(ids) + 1, KV_BLOCK):
        name = _hash(bytes.fromhex(name), ids[end - KV_BLOCK : end])
        yield name, end


def _hash(before: bytes, ids: Ints) -> str:
    data = before + ids.astype("<i4").tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _head(data: bytes, path: Path) -> tuple[int, int, int]:
    """Number of ids, checksum, number of bytes; raises ValueError."""
    if len(data) < _HEAD.size:
        raise ValueError(path)
    magic, ids, checksum, nbytes = _HEAD.unpack(data)
    if magic != _MAGIC or ids > KV_BLOCK:
        raise ValueError(path)
    return ids, checksum, nbytes


def _ids_of(path: Path) -> Ints | None:
    """The ids of a tail; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            count, _, _ = _head(file.read(_HEAD.size), path)
            found = np.frombuffer(file.read(4 * count), "<i4")
    except (OSError, ValueError):
        return None
    return found.astype(np.int32) if len(found) == count else None


def common_length(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """With how many equal ids both begin."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if differing.size else shorter
