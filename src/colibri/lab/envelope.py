"""The one form in which every bench reports to machines.

`{schema, commit, machine, settings, ceilings, results}`: the ceilings were measured in the same run
as the results. Where a figure would mislead, `not_a_measurement` says why, and the command exits 3.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri.lab.machine import machine_facts

NOT_A_MEASUREMENT = 3  # exit code
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A bench's report.

    Attributes:
        schema: what the results are, with a version: "colibri.bench.kernels/1".
        settings: every value that was in force.
        ceilings: limits of the machine by name, such as `dram_read_bytes_per_s`.
        results: one mapping a figure.
        reasons: why this is not a measurement; empty where it is one.
        machine: what it was measured on.
        commit: what was measured, as git names it.
    """

    schema: str
    settings: Mapping[str, Any]
    ceilings: Mapping[str, float]
    results: Sequence[Mapping[str, Any]]
    reasons: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=machine_facts)
    commit: str | None = field(default_factory=lambda: commit_of_package())

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        shown: dict[str, Any] = {
            "schema": self.schema,
            "commit": self.commit,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "ceilings": dict(self.ceilings),
            "results": [dict(result) for result in self.results],
        }
        return shown | ({"not_a_measurement": list(self.reasons)} if self.reasons else {})


def commit_of_package() -> str | None:
    """The commit of this package's checkout; None where it is installed."""
    return commit_of(_PACKAGE)


def commit_of(package: Path) -> str | None:
    """The commit of the checkout that holds `package`, `-dirty` where files differ; else None."""
    if not (package.parents[1] / "pyproject.toml").is_file():
        return None  # installed, perhaps into somebody else's checkout
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip() or None
    return None
