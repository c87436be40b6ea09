"""`coli bench disk`: how fast a model's records can be read, by size of reads and their number.

What reads fastest is remembered for the device, as the engine's own short measurement at first use
would be; this one takes longer and so is surer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from colibri.lab.bench_config import why_too_busy
from colibri.lab.bench_model import Progress, with_model
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure, device_bytes, files_bytes, why_no_measurement
from colibri.lab.limits import DriveLimit
from colibri.lab.machine import machine_facts
from colibri.lab.rig import reading_in_force
from colibri.lab.stream_bench import StreamBench
from colibri.llm.loading import Prepared, prepare
from colibri.memory.devices import Reading, remember
from colibri.memory.opening import is_measurable, reading_key
from colibri.memory.other_load import OtherLoad
from colibri.settings import Settings
from colibri.units import format_bytes

SCHEMA = "colibri.bench.disk/1"
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8)
_BETTER = 1.05  # what is not the default must be so much faster: drives are noisy


def bench_disk(bench: StreamBench, settings: Settings, progress: Progress) -> Envelope:
    """Read records in every way, in rounds.

    Raises:
        CheckpointError, SettingsError, BudgetError: as preparing a model raises them.
    """
    prepared = prepare(with_model(settings, progress))
    experts = prepared.description.experts
    load = OtherLoad()
    ways = [Reading(threads=depth, block=block) for block in BLOCKS for depth in DEPTHS]
    ways.append(Reading(direct=False))
    rates, device, engine = _rates(prepared, bench, ways, progress)
    model_bytes = files_bytes(prepared.directory)
    rows = [_row(way, column, model_bytes) for way, column in zip(ways, rates.T, strict=True)]
    chosen = choose(ways, np.median(rates, axis=0).tolist(), int(experts.nbytes.sum(axis=2).max()))
    cache = prepared.settings.reader.cache
    if cache is not None and is_measurable(experts):
        remember(cache, reading_key(experts, np.zeros(1, np.int64)), chosen)
    rows = [
        replace(row, details={**row.details, "chosen": way == replace(chosen, bytes_per_s=0)})
        for row, way in zip(rows, ways, strict=True)
    ]
    total = Figure(
        figure="disk_bytes",
        regime="all of the above",
        value=None,
        device_bytes=device,
        engine_bytes=engine,
        model_bytes=model_bytes,
        note="bytes asked for, and bytes that the device gave",
    )
    machine = machine_facts() | {"others_cpu_share": load.share()}
    return Envelope(
        schema=SCHEMA,
        settings=prepared.settings.as_dict() | bench.as_dict()
        | {"reading": asdict(reading_in_force(prepared))},
        ceilings={"disk_read_bytes_per_s": float(np.median(rates, axis=0).max())},
        results=[row.as_dict() for row in [*rows, total]],
        reasons=why_no_measurement([total], model_bytes, bench.pairs) + why_too_busy(machine),
        machine=machine,
    )  # fmt: skip


def _rates(
    prepared: Prepared, bench: StreamBench, ways: Sequence[Reading], progress: Progress
) -> tuple[NDArray[np.float64], int | None, int]:
    """Bytes per second `[rounds, ways]`, and what the device gave and was asked for."""
    rates = np.zeros((bench.pairs, len(ways)))
    before, experts = device_bytes(), prepared.description.experts
    with DriveLimit(experts, Reading()) as direct, DriveLimit(experts, ways[-1]) as buffered:
        for number in range(bench.pairs):
            progress("reading records", number, bench.pairs)
            for column, way in enumerate(ways):
                limit = direct if way.direct else buffered
                rates[number, column] = limit.rate(way.block, way.threads, bench.sample_bytes // 2)
        asked = direct.bytes_read + buffered.bytes_read
    progress("reading records", bench.pairs, bench.pairs)
    after = device_bytes()
    given = None if before is None or after is None else after - before
    return rates, given, asked


def choose(ways: Sequence[Reading], rates: Sequence[float], record_nbytes: int) -> Reading:
    """The fastest, or the default where that is hardly slower.

    A step often waits for a single record: blocks larger than the default's are for records that
    keep all threads busy with them, as in the engine's own measurement.
    """
    speeds, usual = dict(zip(ways, rates, strict=True)), Reading()
    fit = [w for w in ways if w.block <= usual.block or w.block * w.threads <= record_nbytes]
    best = max(fit, key=lambda way: speeds[way])
    if usual in speeds and speeds[best] < _BETTER * speeds[usual]:
        best = usual
    return replace(best, bytes_per_s=round(speeds[best]))


def _row(way: Reading, rates: NDArray[np.float64], model_bytes: int) -> Figure:
    how = "direct" if way.direct else "through the page cache"
    return Figure.of(
        "disk_read",
        f"blocks of {format_bytes(way.block)}, {way.threads} at a time, {how}",
        rates.tolist(),
        model_bytes=model_bytes,
        details={"block": way.block, "depth": way.threads, "direct": way.direct},
    )
