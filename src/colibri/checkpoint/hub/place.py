"""Where a repository's files go on this machine: the shared cache, or a directory of one's own.

The cache is huggingface_hub's, so that what any program fetched serves all of them: contents under
the names of their digests in `blobs`, links to them in `snapshots/COMMIT`, what a branch was in
`refs`. A directory holds plain files, and in `.colibri-hub.json` where they came from.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri.checkpoint.directory_lock import DirectoryLock
from colibri.checkpoint.hub.digest import Digest, digest_of
from colibri.checkpoint.hub.names import RepoName, cached_name, repository_folder
from colibri.checkpoint.hub.repository import HubFile, Listing, is_inside
from colibri.checkpoint.safetensors_writer import write_json
from colibri.checkpoint.strict_json import read_object
from colibri.errors import CheckpointError, HubError

ORIGIN = ".colibri-hub.json"
_ORIGIN_LIMIT = 64 << 20


class Place(ABC):
    """Where files go.

    Attributes:
        directory: what is given to other commands.
        root: which must not be written to by two at a time; it is on the disk that fills.
    """

    directory: Path
    root: Path

    @abstractmethod
    def part(self, file: HubFile) -> Path:
        """Where a file grows."""

    @abstractmethod
    def target(self, file: HubFile) -> Path:
        """Where it is when it is whole."""

    @abstractmethod
    def has(self, file: HubFile) -> bool:
        """Whether it is there."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare for files."""

    @abstractmethod
    def add(self, file: HubFile) -> None:
        """Take in a file that is at its target."""

    def alone(self) -> DirectoryLock:
        """Keep others out; raises HubError where one is at work."""
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            return DirectoryLock(self.root, wait=False)
        except BlockingIOError:
            raise HubError(
                f"{self.root}: another pull is writing here: wait for it, or name another directory"
            ) from None


@dataclass(slots=True)
class Cached(Place):
    """The shared cache."""

    listing: Listing
    root: Path = field(init=False)
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = repository_folder(self.listing.name.repo)
        self.directory = self.root / "snapshots" / self.listing.commit

    def target(self, file: HubFile) -> Path:
        """Its blob."""
        return self.root / "blobs" / file.digest.value

    def part(self, file: HubFile) -> Path:
        """Beside its blob."""
        return self.root / "blobs" / f"{file.digest.value}.incomplete"

    def has(self, file: HubFile) -> bool:
        """Whether its blob is there, or a copy where links are not possible."""
        found = self.target(file)
        found = found if found.exists() else self.directory / file.name
        return found.is_file() and found.stat().st_size == file.nbytes

    def begin(self) -> None:
        """Remember which commit the revision is."""
        revision = self.listing.name.revision or "main"
        if revision != self.listing.commit:
            reference = self.root / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.listing.commit)

    def add(self, file: HubFile) -> None:
        """Link to its blob, or move it where links are not possible."""
        link, blob = self.directory / file.name, self.target(file)
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_file() or not blob.exists():
            return
        link.unlink(missing_ok=True)  # a link to nothing
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:
            blob.rename(link)


@dataclass(slots=True)
class Folder(Place):
    """A directory of one's own."""

    listing: Listing
    directory: Path
    root: Path = field(init=False)
    _times: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.directory

    def target(self, file: HubFile) -> Path:
        """Its name in the repository."""
        return self.directory / file.name

    def part(self, file: HubFile) -> Path:
        """Beside it, under a name that tells contents apart."""
        path = self.target(file)
        return path.with_name(f"{path.name}.{file.digest.value[:12]}.incomplete")

    def has(self, file: HubFile) -> bool:
        """Whether it is there: as it was when it was fetched, or of the same contents."""
        path = self.target(file)
        if not path.is_file() or path.stat().st_size != file.nbytes:
            return False
        if self._times.get(file.name) != path.stat().st_mtime_ns:
            if digest_of(path, file.digest.kind) != file.digest:
                return False
            self._times[file.name] = path.stat().st_mtime_ns
        return True

    def begin(self) -> None:
        """Read what is there from an earlier time.

        Raises:
            HubError: that is of another repository.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if (origin := Origin.of(self.directory)) is None:
            return
        if origin.name.repo != self.listing.name.repo:
            raise HubError(
                f"{self.directory}: holds {origin.name}, not {self.listing.name}: name another "
                "directory, or remove it first"
            )
        same = {f.name for f in self.listing.files} & origin.files.keys()
        wanted = {file.name: file.digest for file in self.listing.files}
        for name in origin.files.keys() - same:  # of an earlier commit: it would be of no use
            (self.directory / name).unlink(missing_ok=True)
        self._times = {
            name: origin.times[name]
            for name in same & origin.times.keys()
            if origin.files[name].digest == wanted[name]
        }
        self._save()

    def add(self, file: HubFile) -> None:
        """Remember that it is whole."""
        self._times[file.name] = self.target(file).stat().st_mtime_ns
        self._save()

    def _save(self) -> None:
        kept = {file.name: file for file in self.listing.files if file.name in self._times}
        Origin(self.listing.name, self.listing.commit, kept, self._times).write(self.directory)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the files of a directory came from.

    Attributes:
        name: the repository, and what was asked of it.
        commit: of which the files are.
        files: those that were whole, with the digests that they should have; -1 bytes where the
            size is not known.
        times: when they were last modified, in nanoseconds; () of a snapshot in the cache.
    """

    name: RepoName
    commit: str
    files: Mapping[str, HubFile]
    times: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Origin | None:
        """What a directory says of itself; None where it did not come from the hub.

        Raises:
            CheckpointError: the file that says it is broken.
        """
        path = directory / ORIGIN
        if path.is_file():
            try:
                return cls._read(read_object(path, _ORIGIN_LIMIT))
            except (KeyError, TypeError, ValueError, AttributeError):
                raise CheckpointError(f"{path}: broken: remove it and pull again") from None
        return _of_snapshot(directory.absolute())

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Origin:
        files = {
            name: HubFile(name, int(about["bytes"]), Digest(about["digest"], about["value"]))
            for name, about in value["files"].items()
            if is_inside(name)
        }
        times = {name: int(value["files"][name]["mtime_ns"]) for name in files}
        return cls(RepoName(value["repo"], value["revision"]), value["commit"], files, times)

    def write(self, directory: Path) -> None:
        """Write it down in the directory."""
        files = {
            name: {
                "bytes": file.nbytes,
                "digest": file.digest.kind,
                "value": file.digest.value,
                "mtime_ns": self.times[name],
            }
            for name, file in sorted(self.files.items())
        }
        about = {"repo": self.name.repo, "revision": self.name.revision, "commit": self.commit}
        write_json(directory / ORIGIN, {**about, "files": files})


def _of_snapshot(directory: Path) -> Origin | None:
    """The names of blobs are digests, those of the folders above say the rest."""
    if (cached := cached_name(directory)) is None:
        return None
    files = {}
    for path in sorted(directory.rglob("*")):
        blob = path.resolve()
        digest = Digest.of_name(blob.name) if path.is_symlink() else None
        if digest is not None:  # it does not tell the size
            name = path.relative_to(directory).as_posix()
            files[name] = HubFile(name, -1, digest)
    return Origin(cached, directory.name, files)
