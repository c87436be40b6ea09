"""`coli bench kernels`: how near the kernels come to the limit of reading memory at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from colibri.kernels.api import Activations, Limits
from colibri.kernels.mapping import Mapping as MemoryMapping
from colibri.lab.bench_attention import LIMITS as ATTENTION_LIMITS
from colibri.lab.bench_attention import bench_attention
from colibri.lab.bench_config import KernelBench
from colibri.lab.bench_latent import LIMITS as LATENT_LIMITS
from colibri.lab.bench_latent import bench_latent
from colibri.lab.bench_matrix import bench_errors, bench_matrices, limits_of
from colibri.lab.bench_moe import bench_experts, limits_of_experts
from colibri.lab.bench_result import Measured, Progress, with_cells
from colibri.lab.bootstrap import interval, median
from colibri.lab.envelope import Envelope
from colibri.lab.machine import machine_facts
from colibri.lab.peer import PeerLibrary
from colibri.lab.working_set import BenchKernels, bench_kernels_of, touched
from colibri.memory.other_load import OtherLoad
from colibri.settings import Settings

SCHEMA = "colibri.bench.kernels/1"
STAGE = "measuring"


def bench_kernels(
    bench: KernelBench, settings: Settings, progress: Progress = lambda stage, done, total: None
) -> Envelope:
    """Measure what `bench` says.

    `settings` give threads, instruction set and, where it is set, the one coding of activations.

    Raises:
        SettingsError, NativeLibraryError: there are no native kernels as wanted.
        BudgetError: memory does not hold the working set.
        RequestError: the peer is unusable.
    """
    library = None if bench.peer is None else PeerLibrary(bench.peer)
    codings = {Activations.FLOAT32, *bench.activations}
    kernels = {coding: bench_kernels_of(settings, coding) for coding in codings}
    load = OtherLoad()
    one = kernels[Activations.FLOAT32]
    for made in kernels.values():
        made.reserve(_limits(bench))
    run = _Run(bench, kernels, library, progress)
    measured = list(run.all())
    limits = np.concatenate([item.limits for item in measured]).tolist()
    low, high = interval(limits)
    machine = machine_facts() | {"others_cpu_share": load.share()}
    return Envelope(
        schema=SCHEMA,
        settings={
            **bench.as_dict(),
            "isa": one.isa,
            "threads": one.threads,
            "activations": [str(coding) for coding in bench.activations],
        },
        ceilings={
            "dram_read_bytes_per_s": median(limits),
            "dram_read_bytes_per_s_low": low,
            "dram_read_bytes_per_s_high": high,
        },
        results=[result.as_dict() for result in with_cells(measured)],
        reasons=bench.why_no_measurement(machine, one.threads),
        machine=machine,
    )


class _Run:
    """The operations one after another, over the same memory."""

    def __init__(
        self,
        bench: KernelBench,
        kernels: Mapping[Activations, BenchKernels],
        library: PeerLibrary | None,
        progress: Progress,
    ) -> None:
        self._bench, self._kernels = bench, kernels
        self._library, self._progress = library, progress
        self._done, self._total = 0, self._count()

    def all(self) -> Iterator[Measured]:
        """Everything that is asked for."""
        bench = self._bench
        if {"matrix", "moe_step"} & set(bench.ops):
            memory = touched(bench.working_set_bytes, "the working set")
            try:
                yield from self._weights(memory)
            finally:
                memory.close()
        if "attention" in bench.ops:
            self._begin()
            yield from bench_attention(bench, self._kernels[Activations.FLOAT32])
        if "latent" in bench.ops:
            self._begin()
            yield from bench_latent(bench, self._kernels[Activations.FLOAT32])
        self._progress(STAGE, self._total, self._total)

    def _weights(self, memory: MemoryMapping) -> Iterator[Measured]:
        bench, data = self._bench, memory.data
        if "matrix" in bench.ops:
            yield from bench_matrices(bench, data, self._kernels, self._library, self._begin)
            yield from bench_errors(bench, data, self._kernels, self._begin)
        if "moe_step" in bench.ops:
            yield from bench_experts(bench, data, self._kernels, self._begin)

    def _begin(self) -> None:
        self._progress(STAGE, self._done, self._total)
        self._done += 1

    def _count(self) -> int:
        bench = self._bench
        matrices = sum(len(shape.matrices()) for shape, _ in bench.weights())
        matrices += len(list(bench.weights(errors_only=True)))
        experts = sum(shape.intermediate_size is not None for shape, _ in bench.weights())
        counts: dict[str, int] = {"matrix": matrices, "moe_step": experts}
        return sum(counts.get(op, 1) for op in bench.ops)


def _limits(bench: KernelBench) -> Limits:
    """Room for the largest of everything."""
    shapes = [matrix for shape in bench.shapes for matrix in shape.matrices()]
    needed = [
        limits_of(shapes, max(bench.num_tokens)),
        limits_of_experts(list(bench.shapes)),
        ATTENTION_LIMITS,
        LATENT_LIMITS,
    ]
    values: dict[str, Any] = {
        name: max(getattr(limits, name) for limits in needed)
        for name in Limits.__dataclass_fields__
        if name != "latent"
    }
    return Limits(**values, latent=LATENT_LIMITS.latent)
