"""A disk that is full, read-only or failing, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colibri.errors import WriteError


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn OSError into WriteError: `path` is what is written to where the system names no file."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or path
        raise WriteError(
            f"{where}: cannot be written: {error.strerror or error}; make room or name another "
            "place, then run the same command again"
        ) from None
