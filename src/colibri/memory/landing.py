"""How one record lands, in Python: reads, checksum, finite floats. The twin of native/reader.c."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, replace

import numpy as np

from colibri.checkpoint.crc32c import crc32c
from colibri.formats import Bytes
from colibri.memory.arena import Arena
from colibri.memory.files import OpenFiles
from colibri.memory.jobs import PAGE, Failure, Jobs, ReaderStats, Reason
from colibri.memory.system import drop_cached, make_buffered

_EXPONENTS = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 2: ("<u2", 0x7F80)}  # by Format.code
_MAX_RETRIES = 1000


class LandingFailed(Exception):  # noqa: N818  (ends one job and carries its answer)
    """A record did not land."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Job:
    """One slot's share of `Jobs`: pieces are (file, offset, nbytes, target)."""

    slot: int
    pieces: list[tuple[int, int, int, int]]
    crc: int | None
    scans: list[list[int]]


def split(jobs: Jobs) -> list[Job]:
    """The jobs one by one, in order."""
    columns = (jobs.files, jobs.offsets, jobs.nbytes, jobs.targets)
    crcs = [None] * len(jobs.slots) if jobs.crcs is None else jobs.crcs.tolist()
    scans = jobs.scans.tolist()
    rows = zip(jobs.slots.tolist(), crcs, *(column.tolist() for column in columns), strict=True)
    return [
        Job(slot, [piece for piece in zip(*pieces, strict=True) if piece[2]], crc, scans)
        for slot, crc, *pieces in rows
    ]


class Landing:
    """Lands records in an arena; any number of threads may call `land` for different slots."""

    def __init__(self, arena: Arena, files: OpenFiles) -> None:
        self._arena, self._files = arena, files
        self._counting = threading.Lock()
        self.stats = ReaderStats()

    def land(self, job: Job) -> None:
        """Read the record into its slot and check it.

        Raises:
            LandingFailed: says why.
        """
        try:
            self._land(job)
        except LandingFailed:
            self._count(failed=1)
            raise

    def _land(self, job: Job) -> None:
        for piece in job.pieces:
            self._read(*piece)
        self._count(records=1, bytes_read=sum(nbytes for _, _, nbytes, _ in job.pieces))
        file, offset = job.pieces[0][:2]
        if job.crc is not None and job.crc != crc32c(self._landed(job)):
            raise LandingFailed(Failure(Reason.CHECKSUM, file=file, offset=offset))
        for part, *run in job.scans:
            start = int(self._arena.parts[job.slot, part])
            if not _all_finite(self._arena.data[start:], *run):
                raise LandingFailed(Failure(Reason.NOT_FINITE, file=file, offset=offset, part=part))

    def _landed(self, job: Job) -> Bytes:
        """The bytes of the record, without a copy where it is one piece."""
        spans = [(target + offset % PAGE, nbytes) for _, offset, nbytes, target in job.pieces]
        pieces = [self._arena.data[start : start + nbytes] for start, nbytes in spans]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read(self, file: int, offset: int, nbytes: int, target: int) -> None:
        if self._files.direct[file]:
            if self._read_direct(file, offset, nbytes, target):
                return
            make_buffered(self._files.fds[file])
            self._files.direct[file] = False
        start, done = target + offset % PAGE, 0
        while done < nbytes:
            done += self._pread(
                file, offset + done, self._arena.data[start + done : start + nbytes]
            )
        drop_cached(self._files.fds[file], offset, nbytes)

    def _read_direct(self, file: int, offset: int, nbytes: int, target: int) -> bool:
        """Read the enclosing pages; False where this file does not take direct reads after all.

        It refuses them, or a read ends short of a page before its useful bytes are complete.
        """
        skip = offset % PAGE
        whole = -(-(skip + nbytes) // PAGE) * PAGE
        done = 0
        while done < skip + nbytes:
            if done % PAGE:
                return False
            into = self._arena.data[target + done : target + whole]
            try:
                done += self._pread(file, offset - skip + done, into)
            except LandingFailed as failed:
                if failed.failure.error == errno.EINVAL:
                    return False
                raise
        self._count(slack_bytes=done - nbytes)
        return True

    def _pread(self, file: int, offset: int, into: Bytes) -> int:
        """Bytes read, at least one. Python itself repeats what a signal interrupts."""
        for _ in range(_MAX_RETRIES):
            try:
                got = os.preadv(self._files.fds[file], [into.data], offset)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LandingFailed(Failure(Reason.IO, error.errno or 0, file, offset)) from None
            if not got:
                raise LandingFailed(Failure(Reason.TRUNCATED, 0, file, offset))
            self._count(reads=1)
            return got
        raise LandingFailed(Failure(Reason.IO, errno.EAGAIN, file, offset))

    def _count(self, **amounts: int) -> None:
        with self._counting:
            sums = {name: getattr(self.stats, name) + amount for name, amount in amounts.items()}
            self.stats = replace(self.stats, **sums)


def _all_finite(data: Bytes, offset: int, nbytes: int, stride: int, count: int, code: int) -> bool:
    """Whether `count` runs of `nbytes`, `stride` apart, hold neither NaN nor infinity."""
    dtype, exponent = _EXPONENTS[code]
    for start in range(offset, offset + count * stride, stride) if stride else [offset] * count:
        items = np.frombuffer(data[start : start + nbytes], dtype)
        if ((items & exponent) == exponent).any():
            return False
    return True
