"""What the user may say about reading experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """Settings of the reader; the fields are those of `colibri.settings`.

    Attributes:
        threads: reads in flight; None means as measured.
        block: bytes of one read, larger pieces being split (0: never); None means as measured.
        verify: whether checksums are looked at when records land.
        mirrors: directories with copies of all or some records.
        cache: where measurements are remembered; None means that nothing is measured.
    """

    threads: int | None = None
    block: int | None = None
    verify: bool = True
    mirrors: tuple[Path, ...] = ()
    cache: Path | None = None
