"""What the server has done, for /stats and /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Numbers since the start.

    Attributes:
        answers: by path and status.
        disconnects: clients that left before the end.
        in_flight: requests being served.
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    disconnects: int = 0
    in_flight: int = 0
