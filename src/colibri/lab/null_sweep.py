"""What a store reads, and how long that takes, where nothing is read: the null tier and its clock.

Decisions are those of the real store, over the model's own records and the slots of its plan, or of
the simulation, which reads the same. So what more memory is worth can be told exactly, for many
traces, without a disk and without noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import RequestError
from colibri.lab.bench_budget import NUM_BUDGETS, spread
from colibri.lab.figure import Figure, files_bytes
from colibri.lab.routed import token_ids
from colibri.lab.sim import misses
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
_TOKENS = 128  # of a trace
_STORE_TOKENS = 16  # of one that goes through the store, which takes longer
_ASKED = 4  # traces of which the store is asked, too
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
    plans = {}
    for regime, context in (("fixed context", run.context_length), ("default context", None)):
        least = _plan(run, context, expert_slots=run.shape[2])
        plans[regime] = [
            tuple(_plan(run, context, ram=r).slots) for r in spread(run, least, context)
        ]
    for eviction, bar in BARS.items():
        every = sorted({slots for each in plans.values() for slots in each})
        traces = [_read(run, eviction, every, number) for number in range(NUM_TRACES)]
        for regime, slots in plans.items():
            found = [[nbytes[each] for each in slots] for nbytes in traces]
            yield _swept(run, f"{eviction}, {regime}", slots, found, bar)


def _read(
    run: Run, eviction: str, slots: Sequence[tuple[int, ...]], number: int
) -> dict[tuple[int, ...], int]:
    """Bytes of a trace by that policy with each of `slots`.

    Where records are of one size, the simulation counts what they all miss in one pass, and the
    store is asked about the first traces to show that it would read the same.
    """
    run.progress(f"null tier, {eviction}", number, NUM_TRACES)
    index, active = run.prepared.description.experts, run.shape[2]
    if len(slots[0]) > 1:
        trace = made_up(number, run.shape, _STORE_TOKENS)
        return {each: replay(index, each, eviction, active, trace).nbytes for each in slots}
    trace = made_up(number, run.shape, _TOKENS)
    found = counted(eviction, trace, [each[0] for each in slots], run.record_bytes)
    if number < _ASKED:
        short = made_up(number, run.shape, _STORE_TOKENS)
        some = slots[:: max(1, len(slots) // 4)]
        expected = counted(eviction, short, [each[0] for each in some], run.record_bytes)
        read = [replay(index, each, eviction, active, short).nbytes for each in some]
        if read != expected:
            raise RequestError(
                f"trace {number}: the store reads {read} bytes, the simulation says {expected}: "
                "one of them is wrong, please report it"
            )
    return dict(zip(slots, found, strict=True))


def counted(eviction: str, trace: Trace, capacities: Sequence[int], record_bytes: int) -> list[int]:
    """Bytes that a policy reads of a trace with room for `capacities` records, ascending."""
    return [n * record_bytes for n in misses(eviction, trace, capacities, trace.leases())]


def _plan(
    run: Run, context: int | None, ram: int | None = None, expert_slots: int | None = None
) -> Plan:
    """How a budget would be divided, or what so many slots would take."""
    wanted = replace(run.settings, ram=ram, expert_slots=expert_slots, context_length=context)
    return prepare(wanted).plan


def _swept(
    run: Run,
    regime: str,
    slots: Sequence[tuple[int, ...]],
    found: Sequence[Sequence[int]],
    bar: float,
) -> Figure:
    """The worst of `found [traces][budgets]`, bytes."""
    ratios = [max(more / less for less, more in pairwise(each)) for each in found]
    return Figure(
        figure="sweep_bytes",
        regime=f"{NUM_BUDGETS} budgets, {NUM_TRACES} traces, null tier: {regime}",
        value=max(ratios),
        at_most=bar,
        rounds=tuple(ratios),
        model_bytes=files_bytes(run.prepared.directory),
        details={
            "slots": [sum(each) for each in slots],
            "replayed_bytes": sum(map(sum, found)),
        },
    )
