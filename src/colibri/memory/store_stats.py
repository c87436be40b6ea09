"""What a store has done, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadBytes:
    """Bytes of records that were read ahead of a request, by what became of them.

    read == useful + late + wasted + failed + withdrawn + waiting

    Attributes:
        read: asked of the reader.
        useful: there when their expert was leased.
        late: still on the way then.
        wasted: evicted, and nobody had leased them.
        failed: could not be read.
        withdrawn: not read after all, or not to the end: the need had passed before.
    """

    read: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    failed: int = 0
    withdrawn: int = 0

    @property
    def waiting(self) -> int:
        """In slots, or on the way to one, and not leased yet."""
        ended = self.useful + self.late + self.wasted + self.failed + self.withdrawn
        return self.read - ended

    def plus(self, **amounts: int) -> Self:
        """The sums after `amounts` more."""
        return replace(self, **{k: getattr(self, k) + v for k, v in amounts.items()})

    def __sub__(self, other: AheadBytes) -> AheadBytes:
        return AheadBytes(**{k: v - getattr(other, k) for k, v in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Expert traffic since the start; hits + misses == requests.

    Attributes:
        requests: experts leased.
        hits: those that were in a slot, or on the way to one.
        late: those of the hits that were still on the way.
        misses: those that had to be read.
        prefetched: reads without a request.
        withdrawn: those of the prefetched that were called off before they had been read.
        evictions: experts that made room.
        records: records that landed.
        failed: reads that failed.
        reads: system calls.
        bytes_read: bytes of the records.
        slack_bytes: read beside them, because direct reads are aligned.
        rescued: reads that one drive failed to give and another gave.
        abandoned_bytes: read of records that were then called off.
        drive_bytes: useful bytes from the model's own files, then from each mirror.
        num_usable: slots that are not retired, under pressure, now.
        wait_s: time spent in `Slots.wait`; native kernels wait by themselves.
        predicted: what became of reads ahead that a prediction asked for.
        warmed: what became of those at start.
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
    abandoned_bytes: int = 0
    drive_bytes: tuple[int, ...] = ()
    num_usable: int = 0
    withdrawn: int = 0
    predicted: AheadBytes = AheadBytes()
    warmed: AheadBytes = AheadBytes()
