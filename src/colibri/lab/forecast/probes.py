"""What this machine does: its drive, its memory, its kernels in each format, in a few seconds.

Kept in the cache directory, and measured anew where they are older than asked for, or where another
drive, format or number of threads is wanted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import BudgetError, NativeLibraryError, SettingsError
from colibri.formats import FORMATS, Bytes, Format, get_format
from colibri.kernels.api import Activations
from colibri.kernels.mapping import Mapping as Mapped
from colibri.lab.bench_matrix import ProductTurns, limits_of
from colibri.lab.bootstrap import median
from colibri.lab.inputs import gaussian
from colibri.lab.limits import DriveLimit
from colibri.lab.working_set import (
    BenchKernels,
    DistinctMatrices,
    bench_kernels_of,
    touched,
)
from colibri.llm.loading import LoadProgress
from colibri.memory.devices import Reading
from colibri.memory.opening import is_measurable, known_reading, reading_key
from colibri.memory.other_load import OtherLoad
from colibri.memory.receipt import write_atomically
from colibri.settings import Settings

NAME = "probes.json"
MOST_AGE_S = 24 * 3600.0
_SHAPE = (768, 2048)  # of the matrices that are multiplied
_WORKING_SET, _ROUNDS, _TURN_S = 192 << 20, 3, 0.04
_MANY = 64  # rows of a prompt's matrices
_DRIVE_BYTES = 96 << 20
_USUAL_DRIVE = 1.5e9  # bytes per second, where there are too few records to measure
_MOST_OTHERS = 0.2  # of the processors; with more, probes are not kept
_LAYER_S = 40e-6  # of a layer outside matrices: Python, pool, norms, router, at one token


@dataclass(frozen=True, slots=True)
class Speed:
    """Of matrices in one format: bytes per second at one row, operations per second at many."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What a machine does.

    Attributes:
        dram_bytes_per_s: reading memory, with all threads.
        disk_bytes_per_s: reading records from the drive.
        layer_s: time of a layer that is not in its matrices.
        speeds: by format.
        threads: that compute.
        at: when it was measured, in seconds since 1970.
        others_share: of the processors, that other programs took meanwhile; None if not told.
        is_drive_assumed: whether the drive was not measured, but a usual one assumed.
    """

    dram_bytes_per_s: float
    disk_bytes_per_s: float
    layer_s: float = _LAYER_S
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    threads: int = 1
    at: float = 0.0
    others_share: float | None = None
    is_drive_assumed: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Whether others were so busy that an idle machine will be faster than this."""
        return self.others_share is not None and self.others_share > _MOST_OTHERS

    def speed(self, fmt: str) -> Speed:
        """Of a format; of one that was not measured, that of bf16, or of memory."""
        found = self.speeds.get(fmt) or self.speeds.get("bf16")
        return found or Speed(self.dram_bytes_per_s, 8 * self.dram_bytes_per_s)

    def scaled(self, *, cores: int | None, memory: float | None, disk: float | None) -> Probes:
        """The same for a machine of other sizes.

        Arithmetic grows with cores, and reading weights with them as far as memory allows.
        """
        by = 1.0 if cores is None else cores / self.threads
        dram = memory or self.dram_bytes_per_s * (min(by, 2.0) if cores else 1.0)
        speeds = {
            name: Speed(min(speed.bytes_per_s * by, 0.85 * dram), speed.flops_per_s * by)
            for name, speed in self.speeds.items()
        }
        return replace(
            self,
            dram_bytes_per_s=dram,
            disk_bytes_per_s=disk or self.disk_bytes_per_s,
            is_drive_assumed=self.is_drive_assumed and disk is None,
            speeds=speeds,
            threads=cores or self.threads,
        )


def probe(
    index: ExpertIndex | None,
    formats: Iterable[str],
    settings: Settings,
    progress: LoadProgress,
    most_age_s: float = MOST_AGE_S,
) -> Probes:
    """What was measured not too long ago, and what is missing of it.

    Without an `index` of records, or where they are few, a usual drive is assumed.

    Raises:
        SettingsError, NativeLibraryError: there are no native kernels, or none are wanted.
        ProbeError: too little memory is free to measure.
    """
    path, key = settings.cache / NAME, _key(index, settings)
    wanted = {name for name in formats if name in FORMATS}
    known = _remembered(path, key, most_age_s)
    missing = sorted(wanted - set(known.speeds if known else ()))
    if known is not None and not missing:
        return known
    kernels = bench_kernels_of(settings, settings.activations or Activations.INT16)
    stages, load = len(missing) + 1, OtherLoad()
    progress("probing this machine", 0, stages)
    dram, speeds = known.dram_bytes_per_s if known else 0.0, dict(known.speeds if known else {})
    with closing(_working_set()) as memory:
        for number, name in enumerate(missing):
            speeds[name], limit = _speed(kernels, get_format(name), memory.data)
            dram = max(dram, limit)
            progress("probing this machine", number + 1, stages)
    disk = known.disk_bytes_per_s if known else _drive(index, settings)
    found = Probes(
        dram_bytes_per_s=dram or 1e10,
        disk_bytes_per_s=disk,
        speeds=speeds,
        threads=kernels.threads,
        at=known.at if known else time.time(),
        others_share=load.share(),
        is_drive_assumed=index is None or not _is_enough(index),
    )
    progress("probing this machine", stages, stages)
    if not found.is_disturbed:
        _remember(path, key, found)
    return found


class ProbeError(BudgetError):
    """This machine cannot be probed just now."""


def _working_set() -> Mapped:
    try:
        return touched(_WORKING_SET, "the probe's working set")
    except BudgetError as error:
        raise ProbeError(str(error)) from None


def _speed(kernels: BenchKernels, fmt: Format, memory: Bytes) -> tuple[Speed, float]:
    """Of one format, and what memory gave meanwhile."""
    kernels.reserve(limits_of([_SHAPE], _MANY))
    weights = DistinctMatrices(memory, fmt, _SHAPE, np.random.default_rng(0))
    one, many = (
        ProductTurns(kernels, weights, gaussian(np.random.default_rng(n), n, _SHAPE[1]), _TURN_S)
        for n in (1, _MANY)
    )
    rounds = [(one.read(), one.multiply(), many.multiply()) for _ in range(_ROUNDS)]
    limit, single, batch = (median([each[i] for each in rounds]) for i in range(3))
    flops = 2.0 * _SHAPE[0] * _SHAPE[1] * _MANY
    return Speed(single * weights.nbytes, batch * flops), limit


def _drive(index: ExpertIndex | None, settings: Settings) -> float:
    if index is None or not _is_enough(index):
        return _USUAL_DRIVE
    reading = known_reading(index, settings.reader.cache) or Reading()
    with DriveLimit(index, reading) as limit:
        return median([limit.sample(_DRIVE_BYTES) for _ in range(_ROUNDS)])


def _is_enough(index: ExpertIndex) -> bool:
    return bool(index.files) and is_measurable(index)


def _key(index: ExpertIndex | None, settings: Settings) -> str:
    """The drive and what computes."""
    drive = "none"
    if index is not None and _is_enough(index):
        drive = reading_key(index, np.flatnonzero((index.file[:, :, 0] >= 0).ravel())[:1])
    wanted = (settings.threads, settings.isa, str(settings.activations))
    return f"{drive} {wanted}"


def _remembered(path: Path, key: str, most_age_s: float) -> Probes | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads(path.read_text(encoding="utf-8"))[key]
        speeds = {name: Speed(**speed) for name, speed in told.pop("speeds").items()}
        found = Probes(**told, speeds=speeds)
        return found if 0 <= time.time() - found.at <= most_age_s else None
    return None


def _remember(path: Path, key: str, probes: Probes) -> None:
    """Keep them; where that is impossible, the next run measures again."""
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**known, key: asdict(probes)}, indent=1) + "\n")


def why_no_probes(settings: Settings) -> str | None:
    """Why nothing can be measured here; None where it can."""
    try:
        bench_kernels_of(settings, Activations.INT16)
    except (SettingsError, NativeLibraryError) as error:
        return str(error)
    return None
