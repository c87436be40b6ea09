"""Rows of `coli bench disk | decode | prefill | roofline`, and when they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colibri.lab.bootstrap import Interval, interval, median

LEAST_MODEL_BYTES = 3_000_000_000
_REACHED = 0.97  # of a bar, by the median; the interval must reach the bar itself
_AGREED = 0.01  # by which the bytes of the engine may differ from those of the device
_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row.

    Attributes:
        figure: its name.
        regime: the set-up in words.
        value: the median of the rounds; None where it could not be measured.
        at_least: the bar; None where there is none.
        at_most: the bar of a figure that must be small.
        interval: 90 % bootstrap interval of the median.
        device_bytes: that the system read for this process meanwhile; None if it does not tell.
        engine_bytes: that the engine says it read.
        model_bytes: size of the model's files.
        rounds: values of all rounds.
        ceilings: medians of what was sampled in the same rounds, by name.
        details: what else the set-up came to.
        note: why there is no value, or what else must be known.
    """

    figure: str
    regime: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    interval: Interval | None = None
    device_bytes: int | None = None
    engine_bytes: int = 0
    model_bytes: int = 0
    rounds: tuple[float, ...] = ()
    ceilings: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None

    @classmethod
    def of(cls, figure: str, regime: str, rounds: Sequence[float], **others: Any) -> Figure:
        """The median of rounds with its interval."""
        return cls(
            figure=figure,
            regime=regime,
            value=median(rounds),
            interval=interval(rounds),
            rounds=tuple(rounds),
            **others,
        )

    @property
    def holds(self) -> bool | None:
        """Whether the bar is reached, as design section 11 says; None without a bar or value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        low, high = self.interval or (self.value, self.value)
        above = self.at_least is None or (
            self.value >= _REACHED * self.at_least and high >= self.at_least
        )
        below = self.at_most is None or (
            self.value <= self.at_most / _REACHED and low <= self.at_most
        )
        return above and below

    @property
    def bytes_agree(self) -> bool | None:
        """Whether engine and device count the same; None where the device does not tell."""
        if self.device_bytes is None:
            return None
        return abs(self.device_bytes - self.engine_bytes) <= _AGREED * max(self.engine_bytes, 1)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"holds": self.holds, "bytes_agree": self.bytes_agree}


def device_bytes() -> int | None:
    """Bytes that storage gave to this process so far; None where the system does not tell."""
    try:
        lines = _IO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts["read_bytes"])


def files_bytes(directory: Path) -> int:
    """Bytes of a model's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def why_no_measurement(figures: Sequence[Figure], model_bytes: int, pairs: int) -> list[str]:
    """What makes the rows meaningless."""
    reasons = []
    if model_bytes < LEAST_MODEL_BYTES:
        reasons.append(f"the model has {model_bytes:,} bytes, and {LEAST_MODEL_BYTES:,} are needed")
    if pairs < 3:
        reasons.append(f"{pairs} rounds: the median of at least 3 counts")
    differing = [row.figure for row in figures if row.bytes_agree is False]
    if differing:
        reasons.append(
            f"the engine counts other bytes than the device ({', '.join(differing)}): does "
            "another cache serve the reads?"
        )
    return reasons
