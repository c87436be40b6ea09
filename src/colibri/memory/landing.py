"""How one record lands, in Python: reads, checksum, finite floats. The twin of native/reader.c."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np

from colibri.checkpoint.crc32c import crc32c
from colibri.formats import Bytes, Scan
from colibri.formats.packing import Packing
from colibri.formats.scanning import all_finite
from colibri.memory.arena import Arena
from colibri.memory.drives import ALWAYS, MIRRORS, NEVER, Drives
from colibri.memory.jobs import PAGE, Failure, Jobs, ReaderStats, Reason
from colibri.memory.system import drop_cached, make_buffered

_MAX_RETRIES = 1000
Piece = tuple[int, int, int, int, int]  # file, offset, nbytes, target, whether it is staged


class LandingFailed(Exception):  # noqa: N818  (ends one job and carries its answer)
    """A record did not land."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Job:
    """One slot's share of `Jobs`."""

    slot: int
    pieces: list[Piece]
    drives: int  # a set, bit d for drive d
    crc: int
    check: int  # NEVER, ALWAYS or MIRRORS of `drives`
    scans: list[list[int]]
    base: int = 0
    packings: tuple[Packing, ...] = ()
    staged: bool = False


def split(jobs: Jobs, drives: Drives) -> list[Job]:
    """The jobs one by one, in order."""
    crcs, checks = drives.checks(jobs)
    usual = (1, 0, NEVER if crcs is None else ALWAYS)
    told = zip((drives.sets(jobs), crcs, checks), usual, strict=True)
    heads = zip(
        jobs.slots.tolist(),
        *([same] * len(jobs.slots) if column is None else column.tolist() for column, same in told),
        strict=True,
    )
    staged = np.broadcast_to(jobs.staged if jobs.staged.size else 0, jobs.files.shape)
    columns = (jobs.files, jobs.offsets, jobs.nbytes, jobs.targets, staged)
    bases = jobs.bases.tolist() or [0] * len(jobs.slots)
    bodies = zip(*(column.tolist() for column in columns), strict=True)
    scans = jobs.scans.tolist()
    return [
        Job(
            slot,
            [piece for piece in zip(*pieces, strict=True) if piece[2]],
            held,
            crc,
            check,
            scans,
            base,
            jobs.packings,
            bool(jobs.staged.any()),
        )
        for (slot, held, crc, check), pieces, base in zip(heads, bodies, bases, strict=True)
    ]


class Landing:
    """Lands records in an arena; any number of threads may call `land` for different slots."""

    def __init__(self, arena: Arena, drives: Drives) -> None:
        self._arena, self._drives = arena, drives
        self._counting = threading.Lock()
        self._in_flight = [0] * len(drives.files)
        self._sums = ReaderStats()
        self._drive_bytes = [0] * len(drives.files)
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        for buffer in arena.staging:
            self._free.put(buffer)
        self._own = threading.local()  # the staging buffer of the job at hand

    @property
    def stats(self) -> ReaderStats:
        """Sums since the start."""
        return replace(self._sums, drive_bytes=tuple(self._drive_bytes))

    def land(self, job: Job) -> None:
        """Read the record into its slot and check it.

        Raises:
            LandingFailed: says why.
        """
        if job.staged:
            self._own.buffer = self._free.get()
        try:
            used = 0
            for piece in job.pieces:
                used |= 1 << self._read_somewhere(job, piece)
            self._count(records=1, bytes_read=sum(nbytes for _, _, nbytes, *_ in job.pieces))
            self._check_or_read_again(job, used)
        except LandingFailed:
            self._count(failed=1)
            raise
        finally:
            if job.staged:
                self._free.put(self._own.buffer)

    # ---- Which drive.

    def _living(self, drives: int) -> list[int]:
        return [
            number
            for number in range(len(self._drives.files))
            if drives >> number & 1 and number not in self._drives.dropped
        ]

    def _read_somewhere(self, job: Job, piece: Piece) -> int:
        """Read a piece from the drive that would be done first, and from others if that fails."""
        told: LandingFailed | None = None
        left = self._living(job.drives)
        while left:
            drive = min(left, key=lambda d: self._seconds(d, piece[2]))
            try:
                self._read_from(drive, piece)
            except LandingFailed as failed:
                if told is None or not drive:  # what became of the model's own file
                    told = failed
                self._blame(drive, failed)
                left.remove(drive)
                continue
            self._count(rescued=int(told is not None))
            return drive
        assert told is not None  # drive 0 holds everything
        raise told

    def _seconds(self, drive: int, nbytes: int) -> tuple[float, float]:
        """Until it would be done, were its bandwidth shared; then what it has given so far."""
        weight = self._drives.weights[drive]
        return (self._in_flight[drive] + nbytes) / weight, self._drive_bytes[drive] / weight

    def _blame(self, drive: int, failed: LandingFailed) -> None:
        if drive:
            self._drives.drop(drive, replace(failed.failure, drive=drive))

    def _check_or_read_again(self, job: Job, used: int) -> None:
        """See landing_check of native/landing.c."""
        try:
            self._check(job, used)
        except LandingFailed as failed:
            first = told = failed
        else:
            return
        for drive in self._living(job.drives):
            found = first
            if used != 1 << drive:
                try:
                    self._read_whole(job, drive)
                except LandingFailed as failed:
                    found = failed
                else:
                    self._count(rescued=1)
                    if not drive:
                        for mirror in self._living(used & ~1):
                            self._blame(mirror, first)
                    return
            self._blame(drive, found)
            if not drive:
                told = found
                if found.failure.reason == Reason.NOT_FINITE:
                    break  # copies would say the same
        raise told

    def _read_whole(self, job: Job, drive: int) -> None:
        for piece in job.pieces:
            self._read_from(drive, piece)
        self._check(job, 1 << drive)

    def _read_from(self, drive: int, piece: Piece) -> None:
        nbytes = piece[2]
        with self._counting:
            self._in_flight[drive] += nbytes
        try:
            self._read(drive, *piece)
            with self._counting:
                self._drive_bytes[drive] += nbytes
        finally:
            with self._counting:
                self._in_flight[drive] -= nbytes

    # ---- Checks.

    def _check(self, job: Job, used: int) -> None:
        file, offset = job.pieces[0][:2]
        if (job.check == ALWAYS or (job.check == MIRRORS and used & ~1)) and job.crc != crc32c(
            self._landed(job)
        ):
            raise LandingFailed(Failure(Reason.CHECKSUM, file=file, offset=offset))
        pieces = [self._piece(piece) for piece in job.pieces] if job.packings else []
        for step in job.packings:
            start = step.to
            start += job.base if step.in_slot else int(self._arena.parts[job.slot, step.part])
            if not step.run(pieces, self._arena.data[start:]):
                failure = Failure(Reason.NOT_FINITE, file=file, offset=offset, part=step.part)
                raise LandingFailed(failure)
        for part, *run in job.scans:
            start = int(self._arena.parts[job.slot, part])
            if not all_finite(self._arena.data[start:], Scan(*run)):
                raise LandingFailed(Failure(Reason.NOT_FINITE, file=file, offset=offset, part=part))

    def _landed(self, job: Job) -> Bytes:
        """The bytes of the record, without a copy where it is one piece."""
        pieces = [self._piece(piece) for piece in job.pieces]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _piece(self, piece: Piece) -> Bytes:
        """Its bytes, where they have landed."""
        _, offset, nbytes, target, staged = piece
        start = target + offset % PAGE
        return self._memory(staged)[start : start + nbytes]

    def _memory(self, staged: int) -> Bytes:
        buffer: Bytes = self._own.buffer if staged else self._arena.data
        return buffer

    # ---- One piece from one drive.

    def _read(
        self, drive: int, file: int, offset: int, nbytes: int, target: int, staged: int
    ) -> None:
        files = self._drives.files[drive]
        fd = files.fds[file]
        if files.direct[file]:
            if self._read_direct(drive, file, offset, nbytes, target, staged):
                return
            make_buffered(fd)
            files.direct[file] = False
        start, done = target + offset % PAGE, 0
        while done < nbytes:
            into = self._memory(staged)[start + done : start + nbytes]
            done += self._pread(drive, file, offset + done, into)
        if not self._drives.keep_cache:
            drop_cached(fd, offset, nbytes)

    def _read_direct(
        self, drive: int, file: int, offset: int, nbytes: int, target: int, staged: int
    ) -> bool:
        """Read the enclosing pages; False where this file does not take direct reads after all.

        It refuses them, or a read ends short of a page before its useful bytes are complete.
        """
        skip = offset % PAGE
        whole = -(-(skip + nbytes) // PAGE) * PAGE
        done = 0
        while done < skip + nbytes:
            if done % PAGE:
                return False
            into = self._memory(staged)[target + done : target + whole]
            try:
                done += self._pread(drive, file, offset - skip + done, into)
            except LandingFailed as failed:
                if failed.failure.error == errno.EINVAL:
                    return False
                raise
        self._count(slack_bytes=done - nbytes)
        return True

    def _pread(self, drive: int, file: int, offset: int, into: Bytes) -> int:
        """Bytes read, at least one. Python itself repeats what a signal interrupts."""
        fd = self._drives.files[drive].fds[file]
        for _ in range(_MAX_RETRIES):
            try:
                got = os.preadv(fd, [into.data], offset)
            except BlockingIOError:
                continue
            except OSError as error:
                failure = Failure(Reason.IO, error.errno or 0, file, offset, drive=drive)
                raise LandingFailed(failure) from None
            if not got:
                raise LandingFailed(Failure(Reason.TRUNCATED, 0, file, offset, drive=drive))
            self._count(reads=1)
            return got
        raise LandingFailed(Failure(Reason.IO, errno.EAGAIN, file, offset, drive=drive))

    def _count(self, **amounts: int) -> None:
        with self._counting:
            sums = {name: getattr(self._sums, name) + amount for name, amount in amounts.items()}
            self._sums = replace(self._sums, **sums)
