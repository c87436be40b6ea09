"""How busy others keep the machine while something is measured."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_USER, _SYSTEM = 11, 12  # fields of /proc/PID/stat behind the name


class OtherLoad:
    """How much of the processors went to anybody else since this was made.

    Processes that this one has started count as its own.
    """

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._before = self._now()

    def share(self) -> float | None:
        """Busy time of others, and time stolen, over all time; None where it is not told."""
        now = self._now()
        if now is None or self._before is None:
            return None
        busy, total, own = (b - a for a, b in zip(self._before, now, strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else None

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds busy and in all, of all processors, and those of this process and its own."""
        with suppress(OSError, ValueError, IndexError):
            words = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
            idle = ticks[3] + ticks[4]  # idle, and idle while a disk works
            return sum(ticks) - idle, sum(ticks), self._own()
        return None

    def _own(self) -> float:
        """Of this process, of those it has waited for, and of those it has not."""
        living = [child.pid for child in multiprocessing.active_children()]  # waits for the others
        return sum(os.times()[:4]) + sum(self._of(pid) for pid in living if pid is not None)

    def _of(self, pid: int) -> float:
        with suppress(OSError, ValueError, IndexError):
            text = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            fields = text.rpartition(")")[2].split()
            ticks = int(fields[_USER]) + int(fields[_SYSTEM])
            return ticks / os.sysconf("SC_CLK_TCK")
        return 0.0
