"""From the least memory to enough for everything: never slower with more, never over the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from colibri.lab.bootstrap import interval, median
from colibri.lab.figure import Figure, files_bytes
from colibri.lab.rig import Stretch
from colibri.lab.routed import token_ids
from colibri.lab.stream_bench import Run, traffic
from colibri.lab.worker import Worker
from colibri.models.plan import Plan
from colibri.units import format_bytes

NUM_BUDGETS = 12
_STICKY = 0.6
_MARGIN = 8 << 20  # one start of the program differs from the next


def sweep(run: Run) -> Iterator[Figure]:
    """Speed at each budget over that at the next smaller one; the worst of them counts."""
    budgets = budgets_of(run, run.context_length)
    found: list[tuple[float, list[float], str]] = []
    turns: list[Stretch] = []
    speeds: dict[int, list[float]] = {ram: [] for ram in budgets}
    tokens = max(2, run.bench.tokens // 2)
    with _Sliding(run) as workers:
        for smaller, larger in pairwise(budgets):
            rounds = []
            arms = [workers.at(smaller), workers.at(larger)]
            label = f"{format_bytes(larger)} against {format_bytes(smaller)}"
            for _ in run.rounds(label):
                few, many = (arm.ask("decode", tokens) for arm in arms)
                rounds.append(many.tokens_per_s / few.tokens_per_s)
                speeds[smaller].append(few.tokens_per_s)
                speeds[larger].append(many.tokens_per_s)
                turns += [few, many]
            found.append((median(rounds), rounds, label))
    worst, rounds, label = min(found)
    yield Figure(
        figure="sweep",
        regime=f"speed at the larger of {NUM_BUDGETS} budgets over the next smaller; {label}",
        value=worst,
        at_least=0.90,
        interval=interval(rounds),
        rounds=tuple(rounds),
        model_bytes=files_bytes(run.prepared.directory),
        details={
            "ratios": {label: ratio for ratio, _, label in found},
            "tokens_per_s": {str(ram): median(values) for ram, values in speeds.items()},
        },
        **traffic(turns),
    )


def peak_memory(run: Run) -> Iterator[Figure]:
    """Peak of resident memory over the budget, every slot filled."""
    for regime, context in (("fixed context", run.context_length), ("default context", None)):
        budgets = budgets_of(run, context)
        shares, turns = [], []
        for number, ram in enumerate(budgets):
            run.progress(f"peak memory, {regime}", number, len(budgets))
            with _worker(run, ram=ram, context_length=context) as worker:
                worker.ask("fill")
                turns.append(worker.ask("decode", 2))
                shares.append(worker.ask("peak_rss") / ram)
        yield Figure(
            figure="peak_rss",
            regime=f"the worst of {NUM_BUDGETS} budgets, {regime}",
            value=max(shares),
            at_most=1.0,
            rounds=tuple(shares),
            model_bytes=files_bytes(run.prepared.directory),
            details={"least": min(shares), "budgets": budgets},
            **traffic(turns),
        )


def budgets_of(run: Run, context: int | None) -> list[int]:
    """Budgets from the least that the model needs to about enough for all its experts."""
    with _worker(run, expert_slots=run.shape[2], context_length=context) as worker:
        plan: Plan = worker.ask("plan")
    return spread(run, plan, context)


def spread(run: Run, plan: Plan, context: int | None) -> list[int]:
    """The same for a `plan` with slots for the experts of one token in one layer.

    Where the `context` is left to the budget, the least has room for one block of K/V.
    """
    least = plan.budget_bytes - plan.spare_bytes + _MARGIN
    if context is None:
        least -= plan.kv_bytes - plan.kv_bytes // max(1, plan.num_kv_blocks)
    layers, experts, active = run.shape
    most = least + round((layers * experts - active) * run.record_bytes / 0.97)
    return [int(ram) for ram in np.linspace(least, most, NUM_BUDGETS)]


@contextmanager
def _worker(run: Run, **changes: Any) -> Iterator[Worker]:
    ids = token_ids(run.trace(stickiness=_STICKY))
    with Worker(run.settings, ids, run.shape[1], **changes) as worker:
        yield worker


class _Sliding:
    """Workers of two neighbouring budgets at a time; an earlier one is closed for the next."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ids = token_ids(run.trace(stickiness=_STICKY))
        self._open: dict[int, Worker] = {}

    def at(self, ram: int) -> Worker:
        """The one with that budget, its slots filled."""
        if ram not in self._open:
            for old in sorted(self._open)[:-1]:
                self._open.pop(old).close()
            made = Worker(
                self._run.settings,
                self._ids,
                self._run.shape[1],
                ram=ram,
                expert_slots=None,
                context_length=self._run.context_length,
            )
            self._open[ram] = made
            made.ask("fill")
            made.ask("decode", max(2, self._run.bench.warm_tokens // 8))
        return self._open[ram]

    def __enter__(self) -> _Sliding:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._open.values():
            worker.close()
