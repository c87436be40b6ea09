"""`coli bench roofline`: steps against the slowest of drive, memory and arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from colibri.lab.bench_model import Progress, with_model
from colibri.lab.bootstrap import median
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure
from colibri.lab.limits import ArithmeticLimit, DriveLimit, MemoryLimit, StepLimit
from colibri.lab.rig import Rig, Stretch
from colibri.lab.routed import Script
from colibri.lab.stream_bench import (
    SHARE,
    Measure,
    Run,
    StreamBench,
    mean_hits,
    measure,
    traffic,
)
from colibri.lab.trace import Trace
from colibri.settings import Settings

SCHEMA = "colibri.bench.roofline/1"
_RECALL = 0.90
_ALONE, _CROSSING = 0.85, 0.75


def bench_roofline(bench: StreamBench, settings: Settings, progress: Progress) -> Envelope:
    """Measure what `bench` says; see `stream_bench.measure` for what it raises."""
    return measure(SCHEMA, FIGURES, bench, with_model(settings, progress), progress)


class _Roof:
    """The limits of a rig's steps, sampled again and again."""

    def __init__(self, run: Run, rig: Rig, drive: DriveLimit, memory: MemoryLimit) -> None:
        self._run, self._rig, self._drive, self._memory = run, rig, drive, memory
        description = rig.prepared.description
        slot_nbytes = description.experts.layers[0].slot_nbytes
        self._arithmetic = ArithmeticLimit(rig.kernels, rig.model, slot_nbytes)
        self._dense = rig.dense_bytes
        plan = rig.prepared.plan
        self._kv_bytes = plan.kv_bytes / max(1, plan.num_kv_blocks) / 64  # of a position

    def decoding(self, turn: Stretch) -> StepLimit:
        """Of one token."""
        layers, _, active = self._run.shape
        experts = layers * active
        nbytes = self._dense + experts * self._rig.record_bytes + turn.positions * self._kv_bytes
        arithmetic = self._arithmetic
        compute = experts * arithmetic.expert_s(1) + arithmetic.dense_s(1, self._dense)
        return self._limit(turn.wanted_bytes / turn.tokens, nbytes, compute)

    @property
    def _head_bytes(self) -> int:
        head = self._rig.model.trunk.head.lm_head
        return head.format.resident_nbytes((head.rows, head.columns))

    def prompt(self, turn: Stretch) -> StepLimit:
        """Of a whole prompt in one pass; each expert is taken to serve as many rows."""
        layers, experts, active = self._run.shape
        rows = max(1, turn.tokens * active // experts)
        of_head = self._head_bytes
        nbytes = self._dense + turn.counts.requests * self._rig.record_bytes
        arithmetic = self._arithmetic
        compute = layers * turn.tokens * active / rows * arithmetic.expert_s(rows)
        compute += arithmetic.dense_s(turn.tokens, self._dense - of_head)
        compute += arithmetic.dense_s(1, of_head)
        return self._limit(turn.wanted_bytes, nbytes, compute)

    def _limit(self, missed: float, nbytes: float, compute_s: float) -> StepLimit:
        run = self._run
        disk = run.drive_rate(self._drive)
        dram = run.keep("dram_read_bytes_per_s", self._memory.sample())
        of_head = self._head_bytes
        head_s = max(of_head / dram, self._arithmetic.dense_s(1, of_head))
        return StepLimit(missed / disk, nbytes / dram, compute_s, head_s)


def disk_bound(run: Run) -> Iterator[Figure]:
    """Most experts miss."""
    trace = run.trace(zipf=0.0)
    yield _decoding(run, "disk-bound", trace, SHARE, _ALONE)


def memory_bound(run: Run) -> Iterator[Figure]:
    """Everything is in memory, and each weight is used for one token."""
    yield _decoding(run, "memory-bound", run.trace(stickiness=0.5), 1.0, _ALONE)


def compute_bound(run: Run) -> Iterator[Figure]:
    """Everything is in memory, and each weight is used for many tokens."""
    context = min(run.bench.prompt_tokens + 1, run.prepared.config.max_position_embeddings)
    tokens = context - 1
    script = Script.of(run.trace(stickiness=0.5))

    def turn(rig: Rig) -> Stretch:
        return rig.prefill(rig.random_ids(tokens))

    yield _measured(
        run,
        "compute-bound",
        f"prompts of {tokens} tokens, all experts in memory",
        script,
        (1.0, context, tokens),
        turn,
        _Roof.prompt,
        _ALONE,
    )


def crossing(run: Run) -> Iterator[Figure]:
    """The drive takes as long as memory."""
    trace = run.trace_of_hits(_crossing_hits(run))
    yield _decoding(run, "crossing", trace, SHARE, _CROSSING)


def _crossing_hits(run: Run) -> float:
    """The hit rate at which missed bytes take as long as memory or arithmetic."""
    script = Script.of(run.trace(stickiness=0.5))
    with (
        run.rig(script, expert_slots=1.0, prefetch="off") as rig,
        run.drive() as drive,
        run.memory(rig) as memory,
    ):
        rig.fill()
        turn = rig.decode(run.bench.tokens)
        limits = [_Roof(run, rig, drive, memory).decoding(turn) for _ in range(3)]
    other = median([max(limit.dram_s, limit.compute_s) for limit in limits])
    missed = other * median(run.sampled["disk_read_bytes_per_s"][-3:]) / run.token_bytes
    return min(0.97, max(SHARE, 1 - missed))


def _decoding(run: Run, regime: str, trace: Trace, share: float, bar: float) -> Figure:
    def turn(rig: Rig) -> Stretch:
        return rig.decode(run.bench.tokens)

    return _measured(
        run,
        regime,
        f"decoding, {share:.0%} of the experts in memory, recall {_RECALL}",
        Script.of(trace, _RECALL),
        (share, run.context_length, run.settings.prefill_chunk),
        turn,
        _Roof.decoding,
        bar,
    )


def _measured(
    run: Run,
    regime: str,
    words: str,
    script: Script,
    sizes: tuple[float, int, int],
    turn: Callable[[Rig], Stretch],
    limit_of: Callable[[_Roof, Stretch], StepLimit],
    bar: float,
) -> Figure:
    share, context, chunk = sizes
    turns, rounds, limits = [], [], []
    changes = {"expert_slots": share, "context_length": context, "prefill_chunk": chunk}
    with run.rig(script, **changes) as rig, run.drive() as drive, run.memory(rig) as memory:
        if share == 1.0:
            rig.fill()
            turn(rig)
        else:
            rig.decode(run.bench.warm_tokens)
        roof = _Roof(run, rig, drive, memory)
        for _ in run.rounds(f"roofline, {regime}"):
            turns.append(turn(rig))
            limits.append(limit_of(roof, turns[-1]))
            seconds = turns[-1].seconds
            steps = 1 if limit_of is _Roof.prompt else turns[-1].tokens
            rounds.append(limits[-1].seconds * steps / seconds)
        return Figure.of(
            "roofline",
            f"{regime}: {words}",
            rounds,
            at_least=bar,
            model_bytes=rig.model_bytes,
            details={
                "tokens_per_s": median([t.tokens_per_s for t in turns]),
                "io_s": median([limit.io_s for limit in limits]),
                "dram_s": median([limit.dram_s for limit in limits]),
                "compute_s": median([limit.compute_s for limit in limits]),
                "head_s": median([limit.head_s for limit in limits]),
                "bound": _usual([limit.bound for limit in limits]),
                "hit_rate": mean_hits(turns),
            },
            **traffic(turns),
        )


def _usual(words: list[str]) -> str:
    return max(set(words), key=words.count)


FIGURES: Mapping[str, Measure] = {
    "disk_bound": disk_bound,
    "memory_bound": memory_bound,
    "compute_bound": compute_bound,
    "crossing": crossing,
}
