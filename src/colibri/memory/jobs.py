"""What is asked of a reader, and what a reader promises.

A job reads one record into one slot: its pieces land, its bytes are checked, then the slot's state
word turns READY or FAILED. Whoever needs the slot looks at that word and at nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import PAGE, ExpertLayerLayout
from colibri.formats import SCAN_F32, Scan
from colibri.formats.packing import FIELDS, Packing
from colibri.kernels.api import Ints

__all__ = [
    "PAGE",
    "Failure",
    "Jobs",
    "Queue",
    "Reader",
    "ReaderStats",
    "Reason",
    "TimedReader",
    "scans_of",
    "steps_of",
]


class Queue(IntEnum):
    """What a job waits in; the lowest goes first. Numbers are those of native/abi_reader.cdef."""

    DEMAND = 0  # somebody waits for it
    PREFETCH = 1  # a layer of this token is predicted to want it
    BACKGROUND = 2  # it will do some good some time


class Reason(IntEnum):
    """Why a slot failed; the numbers are those of native/abi_reader.cdef."""

    IO = 1
    TRUNCATED = 2
    CHECKSUM = 3
    NOT_FINITE = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """What the reader knows of a failed slot.

    Attributes:
        reason: the kind of failure.
        error: errno, for IO.
        file: index into the reader's files.
        offset: byte in that file.
        part: number of the part that is not finite, or -1.
        drive: 0 for the model's own files, else the number of the mirror.
    """

    reason: Reason
    error: int = 0
    file: int = 0
    offset: int = 0
    part: int = -1
    drive: int = 0


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """Sums since the start.

    Attributes:
        records: records that landed whole.
        failed: jobs that ended in FAILED, cancelled ones aside.
        reads: system calls that brought bytes.
        bytes_read: useful bytes of those records.
        slack_bytes: what direct reads brought along because they are aligned.
        rescued: blocks and records that one drive failed to give and another gave.
        abandoned_bytes: useful bytes of records that were called off before all of them were there.
        drive_bytes: useful bytes that each drive gave.
    """

    records: int = 0
    failed: int = 0
    reads: int = 0
    bytes_read: int = 0
    slack_bytes: int = 0
    rescued: int = 0
    abandoned_bytes: int = 0
    drive_bytes: tuple[int, ...] = ()

    def by_name(self) -> dict[str, Any]:
        """Its values; `asdict` would copy what they consist of."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Records of one layer to read, n jobs of P pieces, in the order in which they shall be read.

    Attributes:
        slots: `[n]` where they go; none of them is LOADING.
        records: `[n]` which records they are: row of the layer times E plus expert.
        files: `[n, P]` index into the reader's files.
        offsets: `[n, P]` first byte in the file.
        nbytes: `[n, P]` bytes; 0 is no piece.
        targets: `[n, P]` arena offset, a multiple of PAGE, of the page that holds the first byte.
        crcs: `[n]` CRC-32C over the pieces in order, or None.
        scans: `[S, 6]` floats to look at, see `scans_of`; the reader keeps the array.
        queue: where they wait.
        bases: `[n]` arena offset of each slot.
        staged: `[P]` whether a piece's target counts from a staging buffer; empty where none does.
        packings: how a record becomes resident when its pieces are there.
        steps: `[S, 22]` the same as rows; the reader keeps the array.
    """

    slots: Ints
    records: NDArray[np.int64]
    files: Ints
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    targets: NDArray[np.int64]
    crcs: NDArray[np.uint32] | None
    scans: NDArray[np.int64]
    queue: Queue = Queue.DEMAND
    bases: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    staged: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    packings: tuple[Packing, ...] = ()
    steps: NDArray[np.int64] = field(default_factory=lambda: steps_of(()))


class Reader(Protocol):
    """Reads records into slots of one arena. One thread at a time submits; any may wait."""

    def submit(self, jobs: Jobs) -> None:
        """Make the slots LOADING and queue the jobs: all of them, or none when this raises."""

    def promote(self, slots: NDArray[np.integer], queue: Queue = Queue.DEMAND) -> int:
        """Move those of `slots` that wait in a later queue to the end of `queue`; how many."""

    def withdraw(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Call off those of `slots [n]` that wait, not on demand; returns which these are, `[n]`.

        They are FAILED now, or will be as soon as a read that is under way has ended.
        """

    def wait(self, slot: int) -> None:
        """Return when the slot is not LOADING. Ctrl-C gets through."""

    def failure(self, slot: int) -> Failure:
        """Why the slot failed."""

    def stats(self) -> ReaderStats:
        """Sums since the start."""

    def queues(self) -> tuple[int, int, int, int]:
        """Jobs that wait in each `Queue`, then what is being read (blocks or records)."""

    def close(self) -> None:
        """Cancel queued jobs, wait for reads in flight, end threads. Closing twice is fine."""


class TimedReader(Reader, Protocol):
    """A reader of real files."""

    def times(self, slot: int) -> tuple[tuple[int, int, int], int]:
        """Of the slot's last job, which has ended: when it was submitted, begun (0: never), ended.

        In nanoseconds of `time.monotonic_ns`; then why it failed, a `Reason` or 0.
        """


def steps_of(packings: Sequence[Packing]) -> NDArray[np.int64]:
    """Packings as native code takes them, `[S, 22]`."""
    return np.array([step.row() for step in packings], np.int64).reshape(-1, FIELDS)


def scans_of(layout: ExpertLayerLayout) -> NDArray[np.int64]:
    """Where a record may not be finite: weights of float formats, scales of coded ones, biases.

    Biases that are packed were looked at then.

    Returns:
        Rows `[S, 6]`: the part, then the fields of its `Scan`.
    """
    rows = [
        (number, *scan)
        for number, part in enumerate(layout.parts)
        for scan in part.format.scans((part.rows, part.columns), part.panel_stride)
    ]
    if layout.biases is not None and not layout.packings:
        places = zip(layout.biases, layout.part_deltas, layout.parts, strict=True)
        for number, (bias, start, part) in enumerate(places):
            rows.append((number, *Scan(bias - start, 4 * part.rows, 0, 1, SCAN_F32)))
    return np.array(rows, np.int64).reshape(-1, 6)
