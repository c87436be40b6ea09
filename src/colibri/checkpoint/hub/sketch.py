"""A model's config and headers without its weights, for whoever only wants to look.

Weight files become sparse files of the right size that hold their headers and nothing else, so
that all that reads headers and sizes works on them as on the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from colibri.checkpoint.hub.digest import Hasher
from colibri.checkpoint.hub.fetch import Patience, Remote
from colibri.checkpoint.hub.repository import HubFile, Listing
from colibri.checkpoint.index import INDEX_NAME
from colibri.checkpoint.safetensors import HEADER_LIMIT
from colibri.checkpoint.safetensors_writer import encode_header, entries_of
from colibri.checkpoint.strict_json import parse_object
from colibri.checkpoint.writing import write_errors
from colibri.errors import HubError

_CONNECTIONS = 8
_WHOLE_BYTES = 64 << 20  # files up to this size that are no weights are fetched whole
_FIRST_BYTES = 64 << 10  # of a weight file: most headers are shorter
_LENGTH_BYTES = 8
_TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken")
# What packed codes say of their own shape lies in thousands of places among the weights.
_IN_DATA = ".weight_shape"


def sketch(
    listing: Listing,
    files: Sequence[HubFile],
    directory: Path,
    progress: Callable[[int, int], None] | None = None,
    patience: Patience | None = None,
) -> int:
    """Make `directory` look like a pull of `files`; returns the bytes that were fetched.

    Raises:
        HubError: the hub does not answer, sends other bytes than it promises, or what is no header.
        WriteError: a file cannot be written.
    """
    wanted = [file for file in files if _is_weights(file) or _is_text(file)]
    done = 0
    with write_errors(directory), ThreadPoolExecutor(_CONNECTIONS) as pool:
        tasks = [
            pool.submit(_Sketch(listing, file, directory, patience or Patience()).draw)
            for file in wanted
        ]
        try:
            for number, task in enumerate(tasks, 1):
                done += task.result()
                if progress is not None:
                    progress(number, len(tasks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        _forget_shapes(directory)
    return done


def _is_weights(file: HubFile) -> bool:
    return file.name.endswith(".safetensors")


def _is_text(file: HubFile) -> bool:
    return file.name.endswith(_TEXT) and file.nbytes <= _WHOLE_BYTES


@dataclass(frozen=True, slots=True)
class _Sketch:
    listing: Listing
    file: HubFile
    directory: Path
    patience: Patience

    def draw(self) -> int:
        """Write the file, or what can be seen of it; returns the bytes that were fetched."""
        path = self.directory / self.file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        remote = Remote.of(self.listing.name.repo, self.listing.commit, self.file)
        if not _is_weights(self.file):
            data = remote.read(0, self.file.nbytes, self.patience) if self.file.nbytes else b""
            self._check(data)
            path.write_bytes(data)
            return len(data)
        head = self._header(remote)
        path.write_bytes(head)
        os.truncate(path, self.file.nbytes)
        return len(head)

    def _check(self, data: bytes) -> None:
        hasher = Hasher(self.file.digest.kind, self.file.nbytes)
        hasher.update(data)
        if hasher.digest() != self.file.digest:
            raise HubError(
                f"{self.file.name}: the server sent other bytes than the hub promises "
                f"({self.file.digest}): try again later"
            )

    def _header(self, remote: Remote) -> bytes:
        """The first bytes of a weight file, up to where its data starts."""
        head = remote.read(0, min(_FIRST_BYTES, self.file.nbytes), self.patience)
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + length
        if not 0 < length <= HEADER_LIMIT or end > self.file.nbytes:
            raise HubError(
                f"{self.file.name}: is no safetensors file: its header has {length} bytes"
            )
        if end > len(head):
            head += remote.read(len(head), end - len(head), self.patience)
        return head[:end]


def _forget_shapes(directory: Path) -> None:
    """Leave out tensors whose contents would be looked at; files are then smaller by them."""
    forgotten: set[str] = set()
    for path in directory.glob("model*.safetensors"):
        with path.open("rb") as file:
            raw = file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))
        header = parse_object(raw, f"{path.name}: header")
        names = {name for name in header if name.endswith(_IN_DATA)}
        if names:
            forgotten |= names
            entries = entries_of({n: about for n, about in header.items() if n not in names})
            path.write_bytes(encode_header(entries))
            os.truncate(path, path.stat().st_size + sum(entry.nbytes for entry in entries))
    index = directory / INDEX_NAME
    if forgotten and index.is_file():
        value = json.loads(index.read_bytes())
        value["weight_map"] = {n: f for n, f in value["weight_map"].items() if n not in forgotten}
        index.write_text(json.dumps(value))
