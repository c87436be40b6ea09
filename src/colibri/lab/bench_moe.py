"""One `moe_step` against the sum of its matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from colibri.checkpoint.record import RecordLayout
from colibri.formats import Bytes, Floats, Format
from colibri.kernels.api import READY, Experts, Limits, Routing, Slots
from colibri.lab.bench_config import ExpertShape, KernelBench
from colibri.lab.bench_matrix import KernelsBy
from colibri.lab.bench_result import Measured, Result
from colibri.lab.bootstrap import interval, median
from colibri.lab.inputs import gaussian
from colibri.lab.pairs import Ring, alternate, items_for
from colibri.lab.working_set import BenchKernels, DistinctExperts, read_turn


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTurns:
    """Contenders over one ring of groups of experts, each group those of one token.

    The parts are computed by bare native calls, the step as the engine calls it.
    """

    kernels: BenchKernels
    weights: DistinctExperts
    ring: Ring
    steps: list[Callable[[], None]]
    parts: list[list[Callable[[], int]]]
    group_nbytes: int

    @classmethod
    def over(
        cls, kernels: BenchKernels, weights: DistinctExperts, num_experts_per_tok: int
    ) -> ExpertTurns:
        """One token's step on every group."""
        active = num_experts_per_tok
        groups = [range(i, i + active) for i in range(0, weights.count - active + 1, active)]
        step = _Step(kernels, weights, active)
        return cls(
            kernels,
            weights,
            Ring(len(groups)),
            [step.on(group) for group in groups],
            [step.parts_of(group) for group in groups],
            active * weights.stride,
        )

    def read(self) -> float:
        """Bytes per second."""
        return read_turn(self.kernels, self.weights.memory, self.ring, self.group_nbytes)

    def seconds_of_steps(self, num: int) -> float:
        """The next `num` steps."""
        chosen = [self.steps[i] for span in self.ring.take(num) for i in range(*span)]
        start = time.perf_counter()
        for step in chosen:
            step()
        return time.perf_counter() - start

    def seconds_of_parts(self, num: int) -> float:
        """The matrices of the next `num` steps, one by one."""
        chosen = [c for span in self.ring.take(num) for i in range(*span) for c in self.parts[i]]
        start = time.perf_counter()
        for call in chosen:
            call()
        return time.perf_counter() - start


class _Step:
    """Everything that a step needs, made once."""

    def __init__(self, kernels: BenchKernels, weights: DistinctExperts, active: int) -> None:
        gate, up, down = weights.layout.parts
        rng = np.random.default_rng(1)
        self._kernels, self._weights = kernels, weights
        self._ids = np.arange(active, dtype=np.int32)
        self._layer = Experts(active, gate, up, down)
        hidden = gaussian(rng, 1, gate.columns)
        mixing = np.full((1, active), 1 / active, np.float32)
        self._routing = Routing(hidden, self._ids[None], mixing, self._ids)
        states = np.full(weights.count, READY, np.int32)
        self._table = Slots(weights.memory, weights.offsets, states, lambda slot: None)
        self._y = np.zeros_like(hidden)
        self._inputs: tuple[Floats, Floats, Floats] = (hidden, hidden, gaussian(rng, 1, gate.rows))
        self._outputs = [np.empty((1, part.rows), np.float32) for part in weights.layout.parts]

    def on(self, group: range) -> Callable[[], None]:
        """The step with its experts in those slots."""
        slots = np.array(group, np.int32)

        def run() -> None:
            self._kernels.moe_step(
                self._layer, self._routing, self._ids, slots, self._table, self._y
            )

        return run

    def parts_of(self, group: range) -> list[Callable[[], int]]:
        """The products of the same experts."""
        return [
            self._kernels.bare_matmul(matrix, x, out)
            for index in group
            for matrix, x, out in zip(
                self._weights.matrices(index), self._inputs, self._outputs, strict=True
            )
        ]


def bench_experts(
    bench: KernelBench, memory: Bytes, kernels: KernelsBy, begin: Callable[[], None]
) -> Iterator[Measured]:
    """Every expert of every shape in every format; `begin` is called before each."""
    for expert, fmt in bench.weights():
        if expert.intermediate_size is None:
            continue
        begin()
        layout = RecordLayout.uniform(fmt, expert.hidden_size, expert.intermediate_size)
        rng = np.random.default_rng(0)
        weights = DistinctExperts(memory, layout, rng, expert.num_experts_per_tok)
        for coding in bench.codings(fmt):
            yield _measure(bench, expert, fmt, weights, kernels[coding])


def _measure(
    bench: KernelBench,
    expert: ExpertShape,
    fmt: Format,
    weights: DistinctExperts,
    kernels: BenchKernels,
) -> Measured:
    turns = ExpertTurns.over(kernels, weights, expert.num_experts_per_tok)
    num = items_for(bench.turn_s, turns.seconds_of_steps, turns.ring.count)
    rates = alternate(
        [
            turns.read,
            lambda: num / turns.seconds_of_steps(num),
            lambda: num / turns.seconds_of_parts(num),
        ],
        bench.pairs,
    )
    limits, steps, parts = rates.T
    nbytes = sum(m.data.size for m in weights.matrices(0)) * expert.num_experts_per_tok
    speed, ratios = median(steps.tolist()), steps / parts
    operations = 2 * 3 * expert.hidden_size * (expert.intermediate_size or 0)
    result = Result(
        op="moe_step",
        shape=expert.name,
        format=fmt.name,
        activations=str(kernels.activations),
        n=1,
        rows=expert.intermediate_size,
        columns=expert.hidden_size,
        threads=kernels.threads,
        bytes_per_s=speed * nbytes,
        share_of_limit=median((steps * nbytes / limits).tolist()),
        share_of_parts=median(ratios.tolist()),
        gops=speed * operations * expert.num_experts_per_tok / 1e9,
        interval=interval(ratios.tolist()),
    )
    return Measured(result, limits, ratios)


def limits_of_experts(shapes: list[ExpertShape]) -> Limits:
    """What a step of one token needs reserved."""
    return Limits(
        rows=1,
        hidden_size=max(shape.hidden_size for shape in shapes),
        attention_width=1,
        intermediate_size=max(shape.intermediate_size or 1 for shape in shapes),
        num_experts=max(shape.num_experts_per_tok for shape in shapes),
        num_experts_per_tok=max(shape.num_experts_per_tok for shape in shapes),
        vocab_size=1,
    )
