"""One thing that was looked at, what follows from it, and what mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """How much a finding matters; `FAULT` means that something does not work."""

    FINE = "fine"
    NOTE = "note"
    SLOW = "slow"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """A check and what came of it.

    Attributes:
        check: what was looked at: `memory`, `drive`, …
        grade: how much it matters.
        found: what is there.
        consequence: what follows from it; empty where all is well.
        mend: the command or the act that mends it; empty where nothing has to be done.
        facts: the same as numbers and names, for machines.
    """

    check: str
    grade: Grade
    found: str
    consequence: str = ""
    mend: str = ""
    facts: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def fine(check: str, found: str, **facts: Any) -> Finding:
    """Nothing has to be done."""
    return Finding(check, Grade.FINE, found, facts=facts)


def note(check: str, found: str, consequence: str, mend: str = "", **facts: Any) -> Finding:
    """Worth knowing."""
    return Finding(check, Grade.NOTE, found, consequence, mend, facts)


def slow(check: str, found: str, consequence: str, mend: str, **facts: Any) -> Finding:
    """It works, and could be faster."""
    return Finding(check, Grade.SLOW, found, consequence, mend, facts)


def fault(check: str, found: str, consequence: str, mend: str, **facts: Any) -> Finding:
    """Something does not work."""
    return Finding(check, Grade.FAULT, found, consequence, mend, facts)
