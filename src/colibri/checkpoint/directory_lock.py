"""Keeps two writers out of one directory, where the system and its file system know locks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

try:
    import fcntl
except ImportError:  # a system without it: the last writer wins
    fcntl = None  # type: ignore[assignment]


class DirectoryLock:
    """Held until `release`, the end of a `with` block, the last reference, or a kill.

    Nothing is left behind in the directory. A file system without locks refuses nobody.

    Args:
        directory: it exists.
        wait: whether to wait for another holder.

    Raises:
        BlockingIOError: another holds it, and `wait` is false.
    """

    def __init__(self, directory: Path, *, wait: bool) -> None:
        self._handle: int | None = None
        if fcntl is None:
            return
        self._handle = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            self.release()

    def release(self) -> None:
        """Let others in; more than once does no harm."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    __del__ = release
