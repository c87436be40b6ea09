"""What the disk benches have in common: how much is measured, on which routing, beside what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri.errors import RequestError
from colibri.lab.bench_config import why_too_busy
from colibri.lab.bench_model import Progress
from colibri.lab.bootstrap import median
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure, files_bytes, why_no_measurement
from colibri.lab.limits import DriveLimit, MemoryLimit
from colibri.lab.machine import machine_facts
from colibri.lab.pairs import LEAST_PAIRS
from colibri.lab.rig import Rig, Stretch, reading_in_force, routed
from colibri.lab.routed import RoutedKernels, Script
from colibri.lab.sim import misses
from colibri.lab.synthetic import Routing, make_trace
from colibri.lab.trace import Trace, read_trace
from colibri.llm.loading import Prepared, prepare
from colibri.memory.other_load import OtherLoad
from colibri.settings import Settings

SHARE = 0.25  # of the experts have slots
QUICK_PAIRS = 3
_TOKENS = 384  # of a trace
_TRIED = 7  # halvings of the stickiness
_MOST_STICKY = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBench:
    """How much is measured.

    Attributes:
        figures: names of those that are wanted; all where there are none.
        pairs: rounds of each.
        tokens: decoded in a round.
        warm_tokens: decoded before the first.
        replay: a route trace in place of made-up routing.
        prompt_tokens: of a prompt.
        sample_bytes: read in a sample of the drive.
        hub_shape: shape of the model in the files of a hub.
    """

    figures: tuple[str, ...] = ()
    pairs: int = LEAST_PAIRS
    tokens: int = 12
    warm_tokens: int = 72
    replay: Path | None = None
    prompt_tokens: int = 512
    sample_bytes: int = 256 << 20
    hub_shape: str = "olmoe-7b"

    def quick(self) -> StreamBench:
        """The same with fewer rounds."""
        return replace(self, pairs=QUICK_PAIRS, tokens=8)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"replay": None if self.replay is None else str(self.replay)}


@dataclass(slots=True)
class Run:
    """One bench under way: opens rigs, samples limits, keeps what was sampled.

    Attributes:
        bench: how much is measured.
        settings: those that the rigs start from; they name the model.
        prepared: that model, understood.
        sampled: every sample of every limit, by the name of its ceiling.
        num_rigs: opened so far.
    """

    bench: StreamBench
    settings: Settings
    progress: Progress
    prepared: Prepared
    sampled: dict[str, list[float]] = field(default_factory=dict)
    num_rigs: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """MoE layers, experts of each, experts of a token."""
        limits = self.prepared.description.blueprint.limits(1)
        layers = self.prepared.description.experts.layers
        num_experts = max(layer.num_experts for layer in layers)
        return len(layers), num_experts, limits.num_experts_per_tok

    @property
    def record_bytes(self) -> int:
        """Of one expert."""
        return self.prepared.description.experts.layers[0].record_nbytes

    @property
    def token_bytes(self) -> int:
        """Of the experts of one token."""
        layers, _, active = self.shape
        return layers * active * self.record_bytes

    def trace(self, *, zipf: float = 1.0, stickiness: float = 0.0) -> Trace:
        """Routing: the trace that is replayed, or one that is made.

        Raises:
            RequestError: the trace is of another model.
        """
        layers, experts, active = self.shape
        if self.bench.replay is None:
            sizes = {"num_layers": layers, "num_experts": experts, "active": active}
            made = Routing(num_tokens=_TOKENS, zipf=zipf, stickiness=stickiness, **sizes)
            return make_trace(made)
        found = read_trace(self.bench.replay)
        if (found.num_layers, found.num_experts, found.active) != self.shape:
            raise RequestError(
                f"{self.bench.replay}: has {found.num_layers} layers of {found.num_experts} "
                f"experts, {found.active} a token; the model has {layers} of {experts}, {active}"
            )
        return found

    def trace_of_hits(self, hits: float, share: float = SHARE) -> Trace:
        """Routing that the default policy serves from memory to about that share."""
        low, high = 0.0, _MOST_STICKY
        for _ in range(_TRIED):
            middle = (low + high) / 2
            found = self.trace(stickiness=middle)
            if hit_rate(found, share) < hits:
                low = middle
            else:
                high = middle
        return self.trace(stickiness=(low + high) / 2)

    def rig(self, script: Script, **changes: Any) -> Rig:
        """A model under a script."""
        self.num_rigs += 1
        wanted = {"expert_slots": SHARE, "context_length": self.context_length, **changes}
        return Rig.open(self.settings, script, profile=self._profile, **wanted)

    @property
    def _profile(self) -> str | None:
        """Where the newest rig writes its trace: the file that is named, then numbered ones."""
        if self.settings.profile is None or self.num_rigs == 1:
            return self.settings.profile
        path = Path(self.settings.profile)
        return str(path.with_stem(f"{path.stem}-{self.num_rigs}"))

    @property
    def context_length(self) -> int:
        """Room for one round of decoding."""
        return max(64, min(256, self.prepared.config.max_position_embeddings))

    @contextmanager
    def drive(self, drops: bool = True) -> Iterator[DriveLimit]:
        """The drive's limit; a rig has been opened before, which measured how to read it."""
        experts = self.prepared.description.experts
        with DriveLimit(experts, reading_in_force(self.prepared), drops=drops) as limit:
            limit.sample(self.bench.sample_bytes)  # does not count
            yield limit

    @contextmanager
    def memory(self, rig: Rig) -> Iterator[MemoryLimit]:
        """The memory's limit."""
        limit = MemoryLimit(rig.kernels)
        try:
            yield limit
        finally:
            limit.close()

    def drive_rate(self, limit: DriveLimit) -> float:
        """One sample."""
        return self.keep("disk_read_bytes_per_s", limit.sample(self.bench.sample_bytes))

    def keep(self, name: str, value: float) -> float:
        """Note a sample of a ceiling."""
        self.sampled.setdefault(name, []).append(value)
        return value

    def rounds(self, stage: str) -> Iterator[int]:
        """Numbers of the rounds, with progress."""
        for number in range(self.bench.pairs):
            self.progress(stage, number, self.bench.pairs)
            yield number
        self.progress(stage, self.bench.pairs, self.bench.pairs)

    def ceilings(self) -> dict[str, float]:
        """Medians of everything sampled."""
        return {name: median(values) for name, values in self.sampled.items()}


def hit_rate(trace: Trace, share: float) -> float:
    """What the default policy hits of a trace's second half, with room for that share."""
    leases = trace.leases()
    skip = len(leases) // 2
    capacity = max(trace.active, int(share * trace.num_keys))
    missed = misses("mixed", trace, [capacity], leases, skip)[0]
    return 1 - missed / sum(map(len, leases[skip:]))


def traffic(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """`device_bytes` and `engine_bytes` of all of them."""
    devices = [s.device_bytes for s in stretches if s.device_bytes is not None]
    return {
        "device_bytes": sum(devices) if len(devices) == len(stretches) else None,
        "engine_bytes": sum(s.engine_bytes for s in stretches),
    }


def mean_hits(stretches: Sequence[Stretch]) -> float:
    """Share of the experts used that was in memory when nothing had been read ahead."""
    return float(np.mean([stretch.hit_rate for stretch in stretches]))


def mean_recall(stretches: Sequence[Stretch]) -> float | None:
    """Share of the experts used that had been foreseen; None where nothing was."""
    wanted = sum(stretch.counts.wanted for stretch in stretches)
    return sum(stretch.counts.foreseen for stretch in stretches) / wanted if wanted else None


Measure = Callable[[Run], Iterator[Figure]]


def measure(
    schema: str,
    figures: Mapping[str, Measure],
    bench: StreamBench,
    settings: Settings,
    progress: Progress,
) -> Envelope:
    """Measure the figures that are wanted, and report.

    Raises:
        RequestError: an unknown figure.
        SettingsError, NativeLibraryError: there are no native kernels.
        CheckpointError, BudgetError: as opening a model raises them.
    """
    for name in bench.figures:
        if name not in figures:
            raise RequestError(f"--figure {name}: known are {', '.join(figures)}")
    load = OtherLoad()
    run = Run(bench, settings, progress, routed(prepare(settings)))
    found = [
        row for name, figure in figures.items() if name in (bench.figures or figures)
        for row in figure(run)
    ]  # fmt: skip
    machine = machine_facts() | {"others_cpu_share": load.share()}
    model_bytes = files_bytes(run.prepared.directory)
    kernels = run.prepared.kernels
    assert isinstance(kernels, RoutedKernels)
    return Envelope(
        schema=schema,
        settings=settings.as_dict()
        | bench.as_dict()
        | {"activations": str(kernels.activations), "isa": kernels.isa, "threads": kernels.threads}
        | {"reading": asdict(reading_in_force(run.prepared))},
        ceilings=run.ceilings(),
        results=[row.as_dict() for row in found],
        reasons=why_no_measurement(found, model_bytes, bench.pairs) + why_too_busy(machine),
        machine=machine,
    )
