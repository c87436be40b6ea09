"""The engine against the same kernels over mapped files, with the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from colibri.lab.bootstrap import median
from colibri.lab.figure import Figure, files_bytes
from colibri.lab.memory_cap import MemoryCap
from colibri.lab.rig import Stretch
from colibri.lab.routed import token_ids
from colibri.lab.stream_bench import SHARE, Run, traffic
from colibri.lab.worker import Worker
from colibri.memory.pressure import floor_of
from colibri.models.plan import Plan

_MARGIN = 96 << 20  # libraries, and what the kernel counts beside the plan
_NAME, _BAR = "against_mmap", 0.9
_REGIME = f"room for {SHARE:.0%} of the experts, flat routing, kernel read-ahead on"


def against_mmap(run: Run) -> Iterator[Figure]:
    """Speed over that of mapped files, over the same ratio of the two ways' ceilings."""
    try:
        with ExitStack() as stack:
            yield _measured(run, stack)
    except OSError as error:
        note = f"memory cannot be capped here, page cache included ({error})"
        yield Figure(figure=_NAME, regime=_REGIME, value=None, at_least=_BAR, note=note)


def _measured(run: Run, stack: ExitStack) -> Figure:
    experts = run.shape[1]
    ids = token_ids(run.trace(zipf=0.0))
    room = needed(run)
    groups = [stack.enter_context(MemoryCap(room)) for _ in range(2)]
    engine, mapped = (
        stack.enter_context(
            Worker(
                run.settings,
                ids,
                experts,
                group=group.path,
                mapped=number == 1,
                drops=False,
                prefetch="off",
                context_length=run.context_length,
                expert_slots=SHARE if number == 0 else run.shape[2],
            )
        )
        for number, group in enumerate(groups)
    )
    drive = stack.enter_context(run.drive(drops=False))
    tokens = max(2, run.bench.tokens // 2)
    for arm in (engine, mapped):
        arm.ask("decode", max(2, run.bench.warm_tokens // 8))
    rounds, turns, ratios, others = [], [], [], []
    for _ in run.rounds("against mapped files"):
        own: Stretch = engine.ask("decode", tokens)
        direct = run.drive_rate(drive)
        other: Stretch = mapped.ask("decode", tokens)
        ceiling = mapped.ask("mapped_rate", run.bench.sample_bytes // 4)
        ratios.append(direct / run.keep("mmap_read_bytes_per_s", ceiling))
        rounds.append(own.tokens_per_s / other.tokens_per_s / ratios[-1])
        turns.append(own)
        others.append(other)
    return Figure.of(
        _NAME,
        _REGIME,
        rounds,
        at_least=_BAR,
        model_bytes=files_bytes(run.prepared.directory),
        details={
            "tokens_per_s": median([turn.tokens_per_s for turn in turns]),
            "mmap_tokens_per_s": median([turn.tokens_per_s for turn in others]),
            "mmap_device_bytes_per_token": sum(t.device_bytes or 0 for t in others)
            / sum(t.tokens for t in others),
            "ratio_of_ceilings": median(ratios),
            "cap_bytes": room,
        },
        **traffic(turns),
    )


def needed(run: Run) -> int:
    """Memory of the engine with its slots, as its plan has it, and what it leaves free."""
    with Worker(
        run.settings,
        token_ids(run.trace()),
        run.shape[1],
        context_length=run.context_length,
        expert_slots=SHARE,
    ) as worker:
        plan: Plan = worker.ask("plan")
    room = plan.budget_bytes - plan.spare_bytes + _MARGIN
    return room + floor_of(room)  # with less it would give slots back
