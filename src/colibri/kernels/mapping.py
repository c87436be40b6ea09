"""Large blocks of memory that kernels compute in: private, anonymous, in huge pages.

Linux has all of it; elsewhere the same calls give ordinary pages. Direct reads into huge pages run
1.1 to 2.5 times as fast as into pages of 4 KiB, at half the processor time.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from colibri.errors import BudgetError
from colibri.formats import Bytes, padded
from colibri.units import format_bytes

HUGE_PAGE = 2 << 20

# Python's default flags would make the mapping shared, which gets no huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Mapping:
    """Zeroed memory that is reserved whole and becomes resident where it is touched.

    Attributes:
        data: `[nbytes]`, the start aligned to 2 MiB.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        """Reserve `nbytes` rounded up to huge pages (`mapping_nbytes`); `what` is named in errors.

        Raises:
            BudgetError: the system refuses.
        """
        self._size = mapping_nbytes(nbytes)
        try:
            self._map = mmap.mmap(-1, self._size + HUGE_PAGE, **_PRIVATE)
        except OSError as error:
            raise BudgetError(
                f"the system refuses {format_bytes(self._size)} for {what} ({error.strerror}): "
                "set a smaller `ram`"
            ) from None
        whole = np.frombuffer(self._map, np.uint8)
        self._start = -whole.ctypes.data % HUGE_PAGE
        self._advise("MADV_HUGEPAGE")
        self.data: Bytes = whole[self._start : self._start + nbytes]

    def close(self) -> None:
        """Give the memory back at once. Arrays that still look at it stay valid and read zeros."""
        self._advise("MADV_DONTNEED")

    def discard(self, start: int, nbytes: int) -> None:
        """Give back whole pages; they read zeros, and take memory again when they are touched."""
        self._advise("MADV_DONTNEED", start, nbytes)

    def _advise(self, name: str, start: int = 0, nbytes: int | None = None) -> None:
        advice, size = getattr(mmap, name, None), self._size if nbytes is None else nbytes
        if advice is not None and size:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice, self._start + start, size)


def mapping_nbytes(nbytes: int) -> int:
    """The most memory that a mapping of `nbytes` can ever occupy."""
    return padded(nbytes, HUGE_PAGE)
