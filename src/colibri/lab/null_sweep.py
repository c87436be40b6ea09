"""What a store reads, and how long that takes, where nothing is read: the null tier and its clock.

Decisions are those of the real store, over the model's own records and the slots of its plan. So
what more memory is worth can be told exactly, for many traces, without a disk and without noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from colibri.checkpoint.experts import ExpertIndex
from colibri.lab.bench_budget import NUM_BUDGETS, spread
from colibri.lab.figure import Figure, files_bytes
from colibri.lab.routed import token_ids
from colibri.lab.stream_bench import Run
from colibri.lab.synthetic import Routing, make_trace
from colibri.lab.trace import Trace
from colibri.llm.loading import prepare
from colibri.memory.arena import Arena
from colibri.memory.expert_store import ExpertStore
from colibri.memory.null import VirtualDisk
from colibri.memory.policies import make_policy
from colibri.memory.slot_classes import slot_classes
from colibri.models.plan import Plan

NUM_TRACES = 50
BARS = {"lru": 1.0, "mixed": 1.002}  # bytes over those of the next smaller budget
_SKEWS, _STICKINESS = (0.0, 0.6, 1.0, 1.4), (0.0, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one trace cost with one number of slots.

    Attributes:
        nbytes: read.
        seconds: of a drive that reads nothing else, one record a second.
    """

    nbytes: int
    seconds: float


def replay(
    index: ExpertIndex, slots: Sequence[int], eviction: str, active: int, trace: Trace
) -> Replayed:
    """Lease what a trace wants, with `slots[c]` slots of each class, by that policy."""
    classes = slot_classes(index)
    arena = Arena([found.slot_nbytes for found in classes], slots)
    rows = [found.layers for found in classes]
    policy = make_policy(eviction, index.file.shape[:2], active, rows, slots)
    disk = VirtualDisk(arena, 1.0)
    store = ExpertStore(index, arena, policy, disk, active)
    for token in np.sort(token_ids(trace), axis=2):
        for layout, experts in zip(index.layers, token, strict=True):
            with store.lease(layout.layer, experts) as held:
                for slot in held.tolist():
                    store.table.wait(slot)
    found = Replayed(store.stats.bytes_read, disk.now)
    store.close()
    return found


def made_up(number: int, shape: tuple[int, int, int], num_tokens: int) -> Trace:
    """A trace by its number: skewed and sticky in twenty ways, each with chances of its own."""
    layers, experts, active = shape
    return make_trace(
        Routing(
            num_tokens=num_tokens,
            num_layers=layers,
            num_experts=experts,
            active=active,
            zipf=_SKEWS[number % len(_SKEWS)],
            stickiness=_STICKINESS[number // len(_SKEWS) % len(_STICKINESS)],
            domain_tokens=max(4.0, num_tokens / 2),
            seed=number,
        )
    )


def worst_ratio(found: Sequence[Replayed]) -> tuple[float, float]:
    """Bytes, and seconds, over those of the next smaller number of slots, at their worst."""
    pairs = list(pairwise(found))
    return (
        max(more.nbytes / less.nbytes for less, more in pairs),
        max(more.seconds / less.seconds for less, more in pairs),
    )


def sweep_bytes(run: Run) -> Iterator[Figure]:
    """Bytes at each budget over those at the next smaller one; the worst of all traces counts."""
    for regime, context in (("fixed context", run.context_length), ("default context", None)):
        least = _plan(run, context, expert_slots=run.shape[2])
        slots = [_plan(run, context, ram=ram).slots for ram in spread(run, least, context)]
        for eviction, bar in BARS.items():
            yield _swept(run, f"{eviction}, {regime}", slots, eviction, bar)


def _plan(
    run: Run, context: int | None, ram: int | None = None, expert_slots: int | None = None
) -> Plan:
    """How a budget would be divided, or what so many slots would take."""
    wanted = replace(run.settings, ram=ram, expert_slots=expert_slots, context_length=context)
    return prepare(wanted).plan


def _swept(
    run: Run, regime: str, slots: Sequence[Sequence[int]], eviction: str, bar: float
) -> Figure:
    index, active = run.prepared.description.experts, run.shape[2]
    ratios, times, total = [], [], 0
    for number in range(NUM_TRACES):
        run.progress(f"null tier, {regime}", number, NUM_TRACES)
        trace = made_up(number, run.shape, 2 * run.bench.tokens)
        found = [replay(index, each, eviction, active, trace) for each in slots]
        ratio, time = worst_ratio(found)
        ratios.append(ratio)
        times.append(time)
        total += sum(each.nbytes for each in found)
    return Figure(
        figure="sweep_bytes",
        regime=f"{NUM_BUDGETS} budgets, {NUM_TRACES} traces, null tier: {regime}",
        value=max(ratios),
        at_most=bar,
        rounds=tuple(ratios),
        model_bytes=files_bytes(run.prepared.directory),
        details={
            "worst_virtual_time": max(times),
            "slots": [sum(each) for each in slots],
            "replayed_bytes": total,
        },
    )
