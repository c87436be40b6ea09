"""Digests by which the hub names contents: SHA-256 of large files, git's SHA-1 of small ones."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from colibri.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE_BYTES = 4 << 20
_LENGTHS = {"sha256": 64, "git-sha1": 40}


class Digest(NamedTuple):
    """The digest of a file's contents.

    Attributes:
        kind: `sha256`, or `git-sha1`, which git computes of `blob SIZE`, a zero byte and the
            contents.
        value: hexadecimal.
    """

    kind: str
    value: str

    @classmethod
    def of_name(cls, name: str) -> Digest | None:
        """What the name of a blob in the shared cache says of its contents, if anything."""
        for kind, length in _LENGTHS.items():
            if re.fullmatch(rf"[0-9a-f]{{{length}}}", name):
                return cls(kind, name)
        return None

    def __str__(self) -> str:
        return f"{self.kind.upper().replace('SHA2', 'SHA-2')} {self.value}"


class Hasher:
    """Computes a digest of `nbytes` that come piece by piece."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self._kind = kind
        if kind == "sha256":
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(f"blob {nbytes}\0".encode(), usedforsecurity=False)

    def update(self, piece: bytes) -> None:
        """Take the next bytes."""
        self._hash.update(piece)

    def digest(self) -> Digest:
        """Of all that was taken."""
        return Digest(self._kind, self._hash.hexdigest())


def hash_file(
    path: Path, hasher: Hasher, nbytes: int | None = None, told: Callable[[int], None] | None = None
) -> None:
    """Feed a file, or its first `nbytes`, to `hasher`; `told` hears of every piece's bytes.

    Raises:
        CheckpointError: it cannot be read, or ends before `nbytes`.
    """
    left = path.stat().st_size if nbytes is None else nbytes
    try:
        with path.open("rb") as file:
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                hasher.update(piece)
                left -= len(piece)
                if told is not None:
                    told(len(piece))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if left:
        raise CheckpointError(f"{path}: ends {left} bytes too early")


def digest_of(path: Path, kind: str, told: Callable[[int], None] | None = None) -> Digest:
    """The digest of a file; raises CheckpointError."""
    hasher = Hasher(kind, path.stat().st_size)
    hash_file(path, hasher, told=told)
    return hasher.digest()
