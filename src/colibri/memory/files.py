"""The files that hold records, opened once for as long as a reader lives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from colibri.errors import ReadError
from colibri.memory.system import open_for_reading


class OpenFiles:
    """Descriptors of a checkpoint's files on one drive.

    Attributes:
        fds: one descriptor for each path, -1 where there is none.
        direct: whether its reads bypass the page cache.
    """

    def __init__(self, paths: Sequence[Path | None], direct: bool = True) -> None:
        """Open all of them, for direct reads where `direct` asks and the file system takes it.

        Raises:
            ReadError: one cannot be opened; the others are closed again.
        """
        self.fds: list[int] = []
        self.direct: list[bool] = []
        try:
            for path in paths:
                self._open(path, direct)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path | None, wanted: bool) -> None:
        fd, direct = -1, False
        if path is not None:
            try:
                fd, direct = open_for_reading(path, wanted)
            except OSError as error:
                raise ReadError(
                    f"{path}: cannot be opened ({error.strerror}); the model's experts are in it"
                ) from None
        self.fds.append(fd)
        self.direct.append(direct)

    def close(self) -> None:
        """Close all; closing twice is fine."""
        while self.fds:
            fd = self.fds.pop()
            if fd >= 0:
                os.close(fd)
