"""What of a container is finished while it is being written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.checkpoint.container_manifest import FILE_NAME, MANIFEST, PROGRESS, FileRecord
from colibri.checkpoint.safetensors_writer import write_json
from colibri.checkpoint.strict_json import read_object, shown
from colibri.errors import CheckpointError

_SIZE_LIMIT = 256 << 20


@dataclass(slots=True)
class Progress:
    """Finished files of a container that is not finished, on disk after every change.

    Attributes:
        directory: where the container grows.
        identity: family and source; only a writer with the same goes on.
        files: by name, size and hash and what the file holds: a layer or dense tensors.
    """

    directory: Path
    identity: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def begin(cls, directory: Path, identity: dict[str, Any]) -> Progress:
        """Start in an empty directory, or go on where the last writer of the same source stopped.

        Files that are not as they were recorded, and files that were not finished, are removed.

        Raises:
            CheckpointError: the directory holds something else.
        """
        progress = cls(directory, identity, {})
        names = {path.name for path in directory.iterdir()}
        if PROGRESS in names and MANIFEST not in names:
            progress._resume()
        elif names:
            what = "a finished container" if MANIFEST in names else "other files"
            raise CheckpointError(
                f"{directory}: holds {what}; name an empty directory or remove it first"
            )
        progress._save()
        return progress

    def add(self, path: Path, about: dict[str, Any]) -> None:
        """Remember a finished file."""
        self.files[path.name] = about
        self._save()

    def layers(self) -> list[dict[str, Any]]:
        """The finished layers, ascending."""
        found = [about for about in self.files.values() if "layer" in about]
        return sorted(found, key=lambda about: int(about["layer"]))

    def dense(self) -> dict[str, Any]:
        """The dense tensors of finished files."""
        return {
            name: about
            for file in self.files.values()
            for name, about in file.get("dense", {}).items()
        }

    def next_dense(self) -> Path:
        """A dense file that is not in use."""
        number = 0
        while (name := f"dense-{number:05}.safetensors") in self.files:
            number += 1
        return self.directory / name

    def end(self) -> None:
        """Forget: `colibri.json` says it all from now on."""
        (self.directory / PROGRESS).unlink()
        sync_directory(self.directory)

    def _resume(self) -> None:
        path = self.directory / PROGRESS
        saved = read_object(path, _SIZE_LIMIT)
        identity, files = saved.get("identity"), saved.get("files", {})
        if identity != self.identity:
            raise CheckpointError(
                f"{self.directory}: holds an unfinished conversion of {_in_words(identity)}; this "
                f"one is of {_in_words(self.identity)}{self._same_words(identity)}: give the same "
                "formats again, name an empty directory, or remove it first"
            )
        self.files = {name: about for name, about in files.items() if self._intact(name, about)}
        for leftover in self.directory.iterdir():
            ours = leftover.suffix == ".part" or FILE_NAME.fullmatch(leftover.name)
            if ours and leftover.name not in self.files:
                leftover.unlink()

    def _same_words(self, other: object) -> str:
        """What tells two sources apart that have the same name and formats."""
        same = _in_words(other) == _in_words(self.identity)
        return ", whose files have changed since" if same else ""

    def _intact(self, name: str, about: Mapping[str, Any]) -> bool:
        path = self.directory / name
        if not path.is_file() or path.stat().st_size != about["bytes"]:
            return False  # hashing it would be a waste
        return FileRecord.of(path).to_json() == {key: about[key] for key in ("bytes", "sha256")}

    def _save(self) -> None:
        value = {"identity": self.identity, "files": self.files}
        write_json(self.directory / PROGRESS, value)
        sync_directory(self.directory)


def _in_words(identity: object) -> str:
    """Source and formats of a conversion."""
    source = identity.get("source") if isinstance(identity, dict) else None
    if not isinstance(source, dict):
        return "something else"
    formats = ", ".join(f"{key} {shown(source[key])}" for key in source if key != "name")
    return f"{shown(source.get('name'))}{f' ({formats})' if formats else ''}"


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
