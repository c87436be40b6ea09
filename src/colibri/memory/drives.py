"""Where records can be read from: the model's own files, and mirrors of all or some of them.

Drive 0 is the model's own directory and the truth. A mirror only ever makes things faster: what it
cannot give, or gives wrong, comes from drive 0, and the mirror is not read any more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.memory.files import OpenFiles
from colibri.memory.jobs import Failure, Jobs, Reason

MAX_DRIVES = 8  # COLIBRI_MAX_DRIVES of native/abi_reader.cdef
NEVER, ALWAYS, MIRRORS = 0, 1, 2  # when a record's checksum is looked at; COLIBRI_CHECK_*

_WHY = {
    Reason.TRUNCATED: "it ends before a record does",
    Reason.CHECKSUM: "a record does not match its checksum",
    Reason.NOT_FINITE: "a record holds a value that is not finite",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A validated copy of some or all records.

    Attributes:
        directory: where it lies; its files have the names of the model's.
        present: `[M * E]` which records it holds.
        crcs: `[M * E]` CRC-32C of the records present, where the mirror knows them.
    """

    directory: Path
    present: NDArray[np.bool_]
    crcs: NDArray[np.uint32] | None = None


class Drives:
    """Open files of every drive, and which of them holds what.

    Attributes:
        directories: of each drive, for reports.
        files: of each drive.
        weights: bytes per second of each drive, or figures in their proportion.
        keep_cache: whether buffered reads leave their pages in the page cache.
        dropped: what became of mirrors that failed.
    """

    def __init__(
        self,
        index: ExpertIndex,
        mirrors: Sequence[Mirror] = (),
        *,
        direct: Sequence[bool] | None = None,
        weights: Sequence[int] | None = None,
        keep_cache: bool = False,
    ) -> None:
        """Open everything.

        Args:
            index: where the records are.
            mirrors: at most `MAX_DRIVES - 1`.
            direct: for each drive, whether direct reads are wanted.
            weights: for each drive, its bandwidth.
            keep_cache: see above.

        Raises:
            ReadError: a file cannot be opened.
        """
        num_drives = 1 + len(mirrors)
        self.paths = [list[Path | None](index.files)]
        self.paths += [_paths(index, mirror) for mirror in mirrors]
        self.directories = [path.parent for path in index.files[:1]] or [Path()]
        self.directories += [mirror.directory for mirror in mirrors]
        self.weights = list(weights or [1] * num_drives)
        self.keep_cache = keep_cache
        self.dropped: dict[int, Failure] = {}
        self._reporting = threading.Lock()
        wanted = direct or [True] * num_drives
        with ExitStack() as opened:
            self.files: list[OpenFiles] = []
            for paths, want in zip(self.paths, wanted, strict=True):
                self.files.append(OpenFiles(paths, want))
                opened.callback(self.files[-1].close)
            opened.pop_all()
        self._sets = np.ones(index.file.shape[0] * index.file.shape[1], np.uint32)
        self._crcs: NDArray[np.uint32] | None = None
        self._known: NDArray[np.bool_] = np.zeros(len(self._sets), bool)
        for number, mirror in enumerate(mirrors, 1):
            self._sets[mirror.present] |= np.uint32(1 << number)
            if mirror.crcs is not None:
                self._learn(mirror.present, mirror.crcs)

    def _learn(self, present: NDArray[np.bool_], crcs: NDArray[np.uint32]) -> None:
        if self._crcs is None:
            self._crcs = np.zeros(len(self._sets), np.uint32)
        self._crcs[present] = crcs[present]
        self._known |= present

    def sets(self, jobs: Jobs) -> NDArray[np.uint32] | None:
        """Of each job, the set of drives that hold its record, bit d for drive d; None is {0}."""
        return self._sets[jobs.records] if len(self.files) > 1 else None

    def checks(self, jobs: Jobs) -> tuple[NDArray[np.uint32] | None, NDArray[np.uint8] | None]:
        """Of each job, the checksum of its record, and when it is looked at; None is always."""
        if jobs.crcs is not None or self._crcs is None:
            return jobs.crcs, None
        known = np.where(self._known[jobs.records], MIRRORS, NEVER).astype(np.uint8)
        return self._crcs[jobs.records], known

    def drop(self, drive: int, failure: Failure) -> None:
        """A mirror has failed; says so once."""
        with self._reporting:
            if drive in self.dropped:
                return
            self.dropped[drive] = failure
        why = _WHY.get(failure.reason) or os.strerror(failure.error)
        path = self.paths[drive][failure.file] or self.directories[drive]
        _log.warning(
            "mirror %s is not read any more: %s, byte %d: %s; the model's own files serve instead "
            "(check the drive, then `coli mirror verify`)",
            self.directories[drive],
            path,
            failure.offset,
            why,
        )

    def close(self) -> None:
        """Close all files; closing twice is fine."""
        for files in self.files:
            files.close()


def _paths(index: ExpertIndex, mirror: Mirror) -> list[Path | None]:
    """Files of the mirror, None for those that hold none of its records."""
    used = np.unique(index.file.reshape(len(mirror.present), -1)[mirror.present])
    return [
        mirror.directory / path.name if number in used else None
        for number, path in enumerate(index.files)
    ]
