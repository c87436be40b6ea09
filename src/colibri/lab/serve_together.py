"""Figures of `coli bench serve` about replies decoded together: each expert is read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from colibri.lab.bootstrap import median
from colibri.lab.figure import Figure
from colibri.lab.limits import DriveLimit, MemoryLimit
from colibri.lab.rig import Rig, Stretch
from colibri.lab.routed import Script
from colibri.lab.stream_bench import SHARE, Measure, Run, mean_hits, traffic

NUM = 4
_BAR, _GAIN = 0.85, 0.9
_PROMPT = 64
_STICKY = 0.5
_SLOTS = f"{SHARE:.0%} of the experts in memory"


def io_bound(run: Run) -> Iterator[Figure]:
    """Four streams where most experts miss: against drive and kernels, and against one stream."""
    yield from _from_disk(run, "streams", NUM, 1)


def one_prompt(run: Run) -> Iterator[Figure]:
    """Four replies to one prompt, which is read once; then the same bar."""
    yield _prompt(run)
    yield from _from_disk(run, "replies to one prompt", 1, NUM)


def memory_bound(run: Run) -> Iterator[Figure]:
    """Four streams where all experts are in memory: against memory and kernels."""
    turns, rounds, limits = [], [], []
    with _resident(run) as rig, run.memory(rig) as memory:
        for _ in run.rounds("four streams, all experts in memory"):
            turn = rig.decode_together(run.bench.tokens, NUM)
            limits.append(_memory_s(run, rig, memory, turn))
            rounds.append(max(limits[-1], _native_s(turn)) / _step_s(turn))
            turns.append(turn)
        yield Figure.of(
            "together_memory",
            f"{NUM} streams, all experts in memory, over the slower of memory and kernels alone",
            rounds,
            at_least=_BAR,
            model_bytes=rig.model_bytes,
            details=_details(turns) | {
                "memory_s": median(limits),
                "kernels_s": median([_native_s(turn) for turn in turns]),
            },
            **traffic(turns),
        )  # fmt: skip


def _from_disk(run: Run, words: str, count: int, n: int) -> Iterator[Figure]:
    turns, singles, bounds, gains, io, own = [], [], [], [], [], []
    with ExitStack() as stack:
        rig = stack.enter_context(_streaming(run))
        whole = stack.enter_context(_resident(run))
        drive = stack.enter_context(run.drive())
        rig.decode_together(run.bench.warm_tokens // NUM, count, n=n)
        before = run.drive_rate(drive)
        for _ in run.rounds(f"{NUM} {words}, from disk"):
            turns.append(rig.decode_together(run.bench.tokens, count, n=n))
            before, rate = _between(run, drive, before)
            singles.append(rig.decode(NUM * run.bench.tokens))
            own.append(_native_s(whole.decode_together(run.bench.tokens, count, n=n)))
            io.append(turns[-1].wanted_bytes / turns[-1].steps / rate)
            bounds.append(max(io[-1], own[-1]) / _step_s(turns[-1]))
            gains.append(_gain(turns[-1], singles[-1]))
        name = "n" if n > 1 else "together"
        details = _details(turns, singles) | {"io_s": median(io), "kernels_s": median(own)}
        common: dict[str, Any] = {"model_bytes": rig.model_bytes, "details": details}
        yield Figure.of(
            f"{name}_io",
            f"{NUM} {words}, {_SLOTS}, over the slower of drive and kernels alone",
            bounds,
            at_least=_BAR,
            **common,
            **traffic(turns),
        )
        yield Figure.of(
            f"{name}_gain",
            f"{NUM} {words}, {_SLOTS}: speed over one's, over 4 x bytes(1) / bytes(union of 4)",
            gains,
            at_least=_GAIN,
            **common,
            **traffic([*turns, *singles]),
        )


def _prompt(run: Run) -> Figure:
    """Experts that passes over the prompt asked for, over those of a request for one reply."""
    rounds, turns = [], []
    with _streaming(run) as rig:
        ids = rig.random_ids(_PROMPT)
        for _ in run.rounds("one prompt, four replies"):
            found = []
            for n in (1, NUM):
                rig.script.seek(0)
                found.append(rig.read_together(ids, n))
            rounds.append(found[1].counts.requests / found[0].counts.requests)
            turns += found
        return Figure.of(
            "n_prompt",
            f"n = {NUM}: experts asked for by passes over a prompt of {_PROMPT}, over n = 1",
            rounds,
            at_most=1.0,
            model_bytes=rig.model_bytes,
            **traffic(turns),
        )


def _streaming(run: Run) -> Rig:
    script = Script.of(run.trace(zipf=0.0))
    return run.rig(script, max_sessions=NUM, context_length=_context(run), kv_ram=_kv(run))


def _resident(run: Run) -> Rig:
    script = Script.of(run.trace(zipf=0.0))
    rig = run.rig(
        script, max_sessions=NUM, context_length=_context(run), kv_ram=_kv(run), expert_slots=1.0
    )
    rig.fill()
    rig.decode_together(run.bench.tokens, NUM)
    return rig


def _context(run: Run) -> int:
    """Room for the longest reply of a round."""
    longest = max(NUM * run.bench.tokens, run.bench.warm_tokens) + _PROMPT
    return min(-(-longest // 64) * 64 + 64, run.prepared.config.max_position_embeddings)


def _kv(run: Run) -> int:
    plan = run.prepared.plan
    blocks = NUM * (_context(run) // 64 + 1)
    return round(blocks * plan.kv_bytes / max(1, plan.num_kv_blocks))


def _between(run: Run, drive: DriveLimit, before: float) -> tuple[float, float]:
    """The drive's rate now, and on average since before."""
    now = run.drive_rate(drive)
    return now, (before + now) / 2


def _memory_s(run: Run, rig: Rig, memory: MemoryLimit, turn: Stretch) -> float:
    """To read from memory, once, what a step uses."""
    used = turn.counts.requests / turn.steps * rig.record_bytes
    rate = run.keep("dram_read_bytes_per_s", memory.sample())
    return (used + rig.dense_bytes) / rate


def _gain(together: Stretch, single: Stretch) -> float:
    bytes_1 = single.wanted_bytes / single.steps
    bytes_4 = together.wanted_bytes / together.steps
    return together.tokens_per_s / single.tokens_per_s / (NUM * bytes_1 / bytes_4)


def _step_s(turn: Stretch) -> float:
    return turn.seconds / turn.steps


def _native_s(turn: Stretch) -> float:
    return turn.native_s / turn.steps


def _details(turns: list[Stretch], singles: list[Stretch] | None = None) -> dict[str, float]:
    found = {
        "tokens_per_s": median([turn.tokens_per_s for turn in turns]),
        "experts_of_a_step": median([turn.counts.requests / turn.steps for turn in turns]),
        "read_bytes_of_a_step": median([turn.wanted_bytes / turn.steps for turn in turns]),
        "hit_rate": mean_hits(turns),
    }
    if singles is not None:
        found |= {
            "one_tokens_per_s": median([turn.tokens_per_s for turn in singles]),
            "one_read_bytes": median([turn.wanted_bytes / turn.steps for turn in singles]),
        }
    return found


FIGURES: Mapping[str, Measure] = {
    "together_io": io_bound,
    "together_memory": memory_bound,
    "n": one_prompt,
}
