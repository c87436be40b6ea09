"""A memory cgroup of a bench's own, so that page cache counts like any other memory."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.memory.system import cgroups

_NUMBERS = count()
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # of cgroups version 1 and 2


class MemoryCap:
    """A group below that of this process, made with a limit and removed when it is empty.

    Attributes:
        path: of the group.
    """

    def __init__(self, nbytes: int) -> None:
        """Make it.

        Raises:
            OSError: there are no memory cgroups, or none can be made.
        """
        parents = cgroups()
        if not parents:
            raise OSError("there are no memory cgroups")
        self.path = parents[0] / f"colibri-bench.{os.getpid()}.{next(_NUMBERS)}"
        self.path.mkdir()
        try:
            name = next((name for name in _LIMITS if (self.path / name).exists()), _LIMITS[0])
            (self.path / name).write_text(str(nbytes))
        except OSError:
            self.path.rmdir()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.path.rmdir()


def enter(path: Path) -> None:
    """Move this process into a group."""
    (path / "cgroup.procs").write_text(str(os.getpid()))
