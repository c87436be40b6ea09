"""What a store has done, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Expert traffic since the start; hits + misses == requests.

    Attributes:
        requests: experts leased.
        hits: those that were in a slot, or on the way to one.
        late: those of the hits that were still on the way.
        misses: those that had to be read.
        prefetched: reads without a request.
        evictions: experts that made room.
        records: records that landed.
        failed: reads that failed.
        reads: system calls.
        bytes_read: bytes of the records.
        slack_bytes: read beside them, because direct reads are aligned.
        rescued: reads that one drive failed to give and another gave.
        drive_bytes: useful bytes from the model's own files, then from each mirror.
        num_usable: slots that are not retired, under pressure, now.
        wait_s: time spent in `Slots.wait`; native kernels wait by themselves.
    """

    requests: int
    hits: int
    late: int
    misses: int
    prefetched: int
    evictions: int
    records: int
    failed: int
    reads: int
    bytes_read: int
    slack_bytes: int
    wait_s: float
    rescued: int = 0
    drive_bytes: tuple[int, ...] = ()
    num_usable: int = 0
