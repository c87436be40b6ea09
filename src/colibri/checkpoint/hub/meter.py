"""Counts bytes as threads bring them, and says how fast they come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_OVER_S = 10.0
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull is.

    Attributes:
        done_bytes: that are here, those of an earlier run among them.
        total_bytes: of all files that were chosen.
        bytes_per_s: over the last ten seconds; 0 where nothing came.
        silent_s: since the last byte.
    """

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    silent_s: float

    @property
    def left_s(self) -> float | None:
        """Until it is done, at this rate; None where nothing comes."""
        left = self.total_bytes - self.done_bytes
        return left / self.bytes_per_s if self.bytes_per_s > 0 else None


class Meter:
    """What is here, and what comes.

    Args:
        done: bytes that were here before.
        total: bytes in all.
        clock: seconds.

    Attributes:
        came: bytes that came so far.
    """

    def __init__(self, done: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.came = 0
        self._done, self._total, self._clock = done, total, clock
        self._began = self._last = clock()
        self._lately: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Bytes came."""
        with self._lock:
            self.came += nbytes
            self._done += nbytes
            self._last = self._clock()
            self._lately.append((self._last, nbytes))

    def correct(self, nbytes: int) -> None:
        """Bytes were here already, or, where negative, are worthless."""
        with self._lock:
            self._done += nbytes

    def progress(self) -> PullProgress:
        """Now."""
        with self._lock:
            now = self._clock()
            while self._lately and now - self._lately[0][0] > _OVER_S:
                self._lately.popleft()
            span = min(max(now - self._began, _LEAST_S), _OVER_S)
            rate = sum(nbytes for _, nbytes in self._lately) / span
            return PullProgress(self._done, self._total, rate, now - self._last)
