"""`coli bench convert`: a conversion in a process of its own, beside what drive and files allow.

The limit is the longer of reading the source and writing the container at the rates of the drive,
which are measured in the same rounds; the bar is 0.6 of it. Time is that of the conversion itself,
with everything on the disk at the end, page cache dropped before.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri.lab.bench_config import why_too_busy
from colibri.lab.bench_model import Progress, hub_model
from colibri.lab.bootstrap import median
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure, files_bytes, why_no_measurement
from colibri.lab.limits import DriveLimit
from colibri.lab.machine import machine_facts
from colibri.lab.rig import reading_in_force
from colibri.lab.stream_bench import StreamBench
from colibri.llm.loading import prepare
from colibri.memory.other_load import OtherLoad
from colibri.settings import Settings

SCHEMA = "colibri.bench.convert/1"
_AT_LEAST = 0.6  # of the limit
_MOST_BYTES = 1_000_000_000  # of the converting process
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Round:
    """One conversion, and the rates of the drive beside it."""

    read_per_s: float
    write_per_s: float
    elapsed_s: float
    source_bytes: int
    total_bytes: int
    peak_bytes: int

    @property
    def share(self) -> float:
        """Of the limit, by time."""
        reading = self.source_bytes / self.read_per_s
        return max(reading, self.total_bytes / self.write_per_s) / self.elapsed_s


def bench_convert(bench: StreamBench, settings: Settings, progress: Progress) -> Envelope:
    """Convert bf16 to int4-g64, in rounds.

    Raises:
        CheckpointError, SettingsError, BudgetError: as preparing a model raises them.
        OSError: the conversion failed.
    """
    prepared = prepare(hub_model(settings, progress, bench.hub_shape))
    source, load = prepared.directory, OtherLoad()
    made = source.with_name(f"{source.name}-converted")
    experts, reading = prepared.description.experts, reading_in_force(prepared)
    rounds = []
    with DriveLimit(experts, reading) as drive:
        for number in range(bench.pairs):
            progress("converting", number, bench.pairs)
            rates = drive.sample(bench.sample_bytes), _write_rate(source.parent, bench.sample_bytes)
            drive.forget()
            rounds.append(_convert(source, made, *rates))
    progress("converting", bench.pairs, bench.pairs)
    model_bytes = files_bytes(source)
    rows = _rows(rounds, model_bytes)
    machine = machine_facts() | {"others_cpu_share": load.share()}
    return Envelope(
        schema=SCHEMA,
        settings=prepared.settings.as_dict() | bench.as_dict(),
        ceilings=_ceilings(rounds),
        results=[row.as_dict() for row in rows],
        reasons=why_no_measurement(rows, model_bytes, bench.pairs) + why_too_busy(machine),
        machine=machine,
    )


def _ceilings(rounds: list[_Round]) -> dict[str, float]:
    return {
        "disk_read_bytes_per_s": median([each.read_per_s for each in rounds]),
        "disk_write_bytes_per_s": median([each.write_per_s for each in rounds]),
    }


def _rows(rounds: list[_Round], model_bytes: int) -> list[Figure]:
    first = rounds[0]
    details = {
        "source_bytes": first.source_bytes,
        "total_bytes": first.total_bytes,
        "elapsed_s": [each.elapsed_s for each in rounds],
    }
    what = "bf16 to int4-g64"
    shares, peaks = [each.share for each in rounds], [float(each.peak_bytes) for each in rounds]
    return [
        Figure.of(
            "convert_share_of_limit", what, shares, at_least=_AT_LEAST, model_bytes=model_bytes,
            ceilings=_ceilings(rounds), details=details,
        ),
        Figure.of(
            "convert_peak_bytes", what, peaks, at_most=_MOST_BYTES, model_bytes=model_bytes
        ),
    ]  # fmt: skip


def _write_rate(directory: Path, nbytes: int) -> float:
    """Bytes per second of writing a file and having it on the disk."""
    piece = np.random.default_rng(0).integers(0, 256, _PIECE_BYTES, np.uint8)
    path = directory / ".bench-write"
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(max(1, nbytes // _PIECE_BYTES)):
                file.write(piece.data)
            os.fsync(file.fileno())
            written = file.tell()
        return written / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def _convert(source: Path, made: Path, read_per_s: float, write_per_s: float) -> _Round:
    """Run the command as its users do."""
    shutil.rmtree(made, ignore_errors=True)
    command = [sys.executable, "-m", "colibri", "convert", str(source), str(made), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            raise OSError(f"the conversion failed: {done.stderr.strip()}")
        report = json.loads(done.stdout)
        peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
        return _Round(
            read_per_s, write_per_s, report["elapsed_s"],
            report["source_bytes"], report["total_bytes"], peak,
        )  # fmt: skip
    finally:
        shutil.rmtree(made, ignore_errors=True)
