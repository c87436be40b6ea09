"""`coli bench call`: what Python costs in a decode step, accounted inside one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.errors import NativeLibraryError, SettingsError
from colibri.kernels.native import NativeKernels
from colibri.lab.bench_config import why_too_busy
from colibri.lab.bootstrap import interval, median
from colibri.lab.envelope import Envelope
from colibri.lab.machine import machine_facts
from colibri.lab.pairs import LEAST_PAIRS
from colibri.llm import LLM
from colibri.llm.loading import LoadProgress, prepare
from colibri.llm.location import uses_bundled
from colibri.memory.other_load import OtherLoad
from colibri.models.family import Family
from colibri.models.generate import generate, shape_config
from colibri.models.registry import all_families
from colibri.settings import Settings

SCHEMA = "colibri.bench.call/1"
TARGET_TOKENS_PER_S = 10.0
_PROMPT, _WARM_STEPS = 16, 4
_SHAPE = "demo"


@dataclass(frozen=True, slots=True)
class CallBench:
    """How many decode steps are looked at."""

    steps: int = 32


class TimedKernels(NativeKernels):
    """Native kernels that count their native calls and the time inside them.

    What surrounds a call in Python, the checks and structs of `NativeKernels` too, does not count.
    """

    native_ns = 0
    native_cpu_ns = 0  # of the calling thread
    native_calls = 0

    def _do(self, function: str, *arguments: Any) -> None:
        cpu, start = thread_time_ns(), perf_counter_ns()
        try:
            super()._do(function, *arguments)
        finally:
            self.native_ns += perf_counter_ns() - start
            self.native_cpu_ns += thread_time_ns() - cpu
            self.native_calls += 1

    def clocks(self) -> NDArray[np.float64]:
        """Now, nanoseconds in native calls, Python's processor time, and how many calls."""
        python_cpu = thread_time_ns() - self.native_cpu_ns
        values = (perf_counter_ns(), self.native_ns, python_cpu, self.native_calls)
        return np.array(values, np.float64)


def bench_call(
    bench: CallBench, settings: Settings, progress: LoadProgress | None = None
) -> Envelope:
    """Decode greedily and tell apart native time and everything else.

    Raises:
        SettingsError, NativeLibraryError: there are no native kernels.
        CheckpointError, BudgetError: as opening a model raises them.
    """
    with _model(settings) as chosen:
        prepared = prepare(chosen)
        kernels = _timed(prepared.kernels)
        prepared = replace(prepared, kernels=kernels)
        model, _ = prepared.load(progress)
        num_layers, name = len(model.layers), str(prepared.directory)
        load = OtherLoad()
        with LLM(prepared, model) as llm:
            steps = _decode(llm, kernels, bench.steps)
    machine = machine_facts() | {"others_cpu_share": load.share()}
    return Envelope(
        schema=SCHEMA,
        settings=settings.as_dict()
        | {"model": name, "isa": kernels.isa, "threads": kernels.threads, "steps": bench.steps}
        | {"activations": str(kernels.activations)},
        ceilings={},
        results=[{"op": "decode_step", "model": name, **_shares(steps, num_layers)}],
        reasons=_why_no_measurement(steps) + why_too_busy(machine),
        machine=machine,
    )


def _decode(llm: LLM, kernels: TimedKernels, num_steps: int) -> NDArray[np.float64]:
    """What `TimedKernels.clocks` gained in each step; `[steps, 4]`."""
    vocab = llm.prepared.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, _PROMPT).tolist()
    steps: list[NDArray[np.float64]] = []
    tokens = _WARM_STEPS + num_steps
    with llm.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True) as stream:
        for _ in range(tokens):
            before = kernels.clocks()
            next(stream)
            steps.append(kernels.clocks() - before)
    return np.array(steps[_WARM_STEPS:])


def _shares(steps: NDArray[np.float64], num_layers: int) -> dict[str, Any]:
    """Medians over the steps; times in seconds."""
    taken, native = steps[:, 0] / 1e9, steps[:, 1] / 1e9
    python = taken - native
    shares = (python / taken).tolist()
    python_s = median(python.tolist())
    return {
        "num_layers": num_layers,
        "step_s": median(taken.tolist()),
        "native_s": median(native.tolist()),
        "python_s": python_s,
        "python_cpu_s": median((steps[:, 2] / 1e9).tolist()),
        "python_s_per_layer": python_s / num_layers,
        "native_calls": median(steps[:, 3].tolist()),
        "python_share": median(shares),
        "interval": interval(shares),
        "python_share_at_10_per_s": python_s * TARGET_TOKENS_PER_S,
    }


def _why_no_measurement(steps: NDArray[np.float64]) -> list[str]:
    reasons = []
    if len(steps) < LEAST_PAIRS:
        reasons.append(f"{len(steps)} steps: the median of at least {LEAST_PAIRS} counts")
    if (steps[:, 3] == 0).any():
        reasons.append("a step without native calls")
    return reasons


def _timed(kernels: object) -> TimedKernels:
    """The same kernels, timed."""
    if not isinstance(kernels, NativeKernels):
        raise NativeLibraryError(
            "Python's share is told from that of native kernels, and there are none: "
            "leave `kernels` out, or build them"
        )
    return TimedKernels(kernels.threads, kernels.activations, kernels.isa)


@contextmanager
def _model(settings: Settings) -> Iterator[Settings]:
    """The settings with a model: theirs, the bundled one, or one made for the time being."""
    if settings.kernels == "reference":
        raise SettingsError("kernels is reference: Python's share of a step is all of it")
    if settings.model is not None or uses_bundled(settings):
        yield settings
        return
    with TemporaryDirectory(prefix="coli-bench-") as folder:
        directory = Path(folder) / _SHAPE
        generate(directory, shape_config(_usual_family(), _SHAPE))
        yield replace(settings, model=str(directory))


def _usual_family() -> Family:
    """The first whose experts have a width of their own."""
    for family in all_families():
        if "moe_intermediate_size" in {item.name for item in fields(family.config)}:
            return family
    raise AssertionError("no family of the registry has experts")
