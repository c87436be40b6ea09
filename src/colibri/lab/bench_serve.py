"""`coli bench serve`: what clients of a server meet, and how near it comes to its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from colibri.errors import RequestError
from colibri.lab.bench_config import why_too_busy
from colibri.lab.bench_model import Progress, with_model
from colibri.lab.bootstrap import median
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure, files_bytes, why_no_measurement
from colibri.lab.machine import machine_facts
from colibri.lab.rig import routed
from colibri.lab.serve_load import load_rows
from colibri.lab.serve_pace import FIGURES as PACE
from colibri.lab.serve_run import ServeBench, ServeRun
from colibri.lab.serve_together import FIGURES as TOGETHER
from colibri.lab.stream_bench import Run, StreamBench
from colibri.llm.loading import prepare
from colibri.memory.other_load import OtherLoad
from colibri.settings import Settings

SCHEMA = "colibri.bench.serve/1"
FIGURES = ("load", *PACE, *TOGETHER)


def bench_serve(bench: ServeBench, settings: Settings, progress: Progress) -> Envelope:
    """Measure what `bench` says, against servers in processes of their own.

    Raises:
        RequestError: an unknown figure.
        EngineDiedError: a server cannot be started; the message is what it said.
        SettingsError, NativeLibraryError: there are no native kernels.
        CheckpointError, BudgetError: as opening a model raises them.
    """
    for name in bench.figures:
        if name not in FIGURES:
            raise RequestError(f"--figure {name}: known are {', '.join(FIGURES)}")
    settings = with_model(settings, progress)
    load, prepared = OtherLoad(), routed(prepare(settings))
    wanted = bench.figures or FIGURES
    found: list[Figure] = []
    run = ServeRun(bench, settings, progress, prepared)
    rigs = Run(_streams(bench), settings, progress, prepared)
    for name in FIGURES:
        if name in wanted:
            found += _measured(name, run, rigs)
    machine = machine_facts() | {"others_cpu_share": load.share()}
    model_bytes = files_bytes(prepared.directory)
    kernels = prepared.kernels
    return Envelope(
        schema=SCHEMA,
        settings=settings.as_dict() | bench.as_dict() | {"kernels": kernels.name},
        ceilings={name: median(values) for name, values in rigs.sampled.items()},
        results=[row.as_dict() for row in found],
        reasons=why_no_measurement(found, model_bytes, bench.pairs) + why_too_busy(machine),
        machine=machine,
    )


def _measured(name: str, run: ServeRun, rigs: Run) -> Iterator[Figure]:
    if name in TOGETHER:
        return TOGETHER[name](rigs)
    return PACE[name](run) if name in PACE else load_rows(run)


def _streams(bench: ServeBench) -> StreamBench:
    """How much the figures without a server measure."""
    streams = StreamBench(pairs=bench.pairs)
    return replace(streams, tokens=max(1, bench.steps // 8))
