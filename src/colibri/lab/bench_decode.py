"""`coli bench decode`: how near decoding comes to what drive and memory allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from colibri.lab.bench_budget import peak_memory, sweep
from colibri.lab.bench_mapped import against_mmap
from colibri.lab.bench_model import Progress, with_model
from colibri.lab.bootstrap import median
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure
from colibri.lab.null_sweep import sweep_bytes
from colibri.lab.routed import Script
from colibri.lab.stream_bench import (
    SHARE,
    Measure,
    Run,
    StreamBench,
    mean_hits,
    mean_recall,
    measure,
    traffic,
)
from colibri.settings import Settings

SCHEMA = "colibri.bench.decode/1"
_RECALLS = ((0.72, 1.08), (0.90, 1.25))  # of predictions, and the bar of lookahead
_USUAL_RECALL, _GOOD_RECALL = 0.72, 0.90
_HITS = 0.85
_FAR = 1.5  # two limits that differ by so much are not near each other
_SLOTS = f"{SHARE:.0%} of the experts in memory"


def bench_decode(bench: StreamBench, settings: Settings, progress: Progress) -> Envelope:
    """Measure what `bench` says; see `stream_bench.measure` for what it raises."""
    return measure(SCHEMA, FIGURES, bench, with_model(settings, progress), progress)


def io_bound(run: Run) -> Iterator[Figure]:
    """Useful bytes over what the drive could have read in the same time."""
    script = Script.of(run.trace(zipf=0.0), _USUAL_RECALL)
    turns, rounds, rates = [], [], []
    with run.rig(script) as rig, run.drive() as drive:
        rig.decode(run.bench.warm_tokens)
        before = run.drive_rate(drive)
        for _ in run.rounds("decoding from disk"):
            turn = rig.decode(run.bench.tokens)
            after = run.drive_rate(drive)
            rates.append((before + after) / 2)
            rounds.append(turn.wanted_bytes / (turn.seconds * rates[-1]))
            turns.append(turn)
            before = after
        yield Figure.of(
            "io_bound_decode",
            f"{_SLOTS}, flat routing, recall {_USUAL_RECALL}",
            rounds,
            at_least=0.85,
            model_bytes=rig.model_bytes,
            ceilings={"disk_read_bytes_per_s": median(rates)},
            details={
                "tokens_per_s": median([turn.tokens_per_s for turn in turns]),
                "hit_rate": mean_hits(turns),
                "recall": mean_recall(turns),
                "wasted_share": sum(
                    t.counts.ahead_wasted_bytes + t.counts.abandoned_bytes for t in turns
                )
                / max(1, sum(t.engine_bytes for t in turns)),
            },
            **traffic(turns),
        )


def nearly_resident(run: Run) -> Iterator[Figure]:
    """Speed over the lower of two limits: that of memory alone, and that of the drive alone."""
    trace = run.trace_of_hits(_HITS)
    turns, whole, rounds, limits, rates = [], [], [], [], []
    script, other = Script.of(trace, _GOOD_RECALL), Script.of(trace)
    with (
        run.rig(script) as rig,
        run.rig(other, expert_slots=1.0) as resident,
        run.drive() as drive,
    ):
        resident.fill()
        rig.decode(run.bench.warm_tokens)
        resident.decode(run.bench.tokens)
        before = run.drive_rate(drive)
        for _ in run.rounds("decoding with most experts in memory"):
            turn = rig.decode(run.bench.tokens)
            after = run.drive_rate(drive)
            full = resident.decode(run.bench.tokens)
            rates.append((before + after) / 2)
            by_drive = rates[-1] * turn.tokens / max(1, turn.wanted_bytes)
            limits.append((full.tokens_per_s, by_drive))
            rounds.append(turn.tokens_per_s / min(limits[-1]))
            turns.append(turn)
            whole.append(full)
            before = after
        by_memory, by_drive = (median([pair[i] for pair in limits]) for i in (0, 1))
        ratio = max(by_memory, by_drive) / min(by_memory, by_drive)
        far = ratio >= _FAR
        yield Figure.of(
            "hits_85",
            f"{_SLOTS}, recall {_GOOD_RECALL}; limits differ by {ratio:.2f}x, "
            f"{'far from' if far else 'near'} each other",
            rounds,
            at_least=0.90 if far else 0.75,
            model_bytes=rig.model_bytes,
            ceilings={"disk_read_bytes_per_s": median(rates)},
            details={
                "tokens_per_s": median([turn.tokens_per_s for turn in turns]),
                "resident_tokens_per_s": by_memory,
                "drive_tokens_per_s": by_drive,
                "hit_rate": mean_hits(turns),
                "recall": mean_recall(turns),
            },
            **traffic(turns),
        )


def lookahead(run: Run) -> Iterator[Figure]:
    """Speed with lookahead over speed without, where reading takes as long as computing."""
    wanted = _balanced_hits(run)
    trace = run.trace_of_hits(wanted)
    for recall, bar in _RECALLS:
        turns, rounds, without = [], [], []
        with (
            run.rig(Script.of(trace, recall), prefetch="on") as ahead,
            run.rig(Script.of(trace), prefetch="off") as plain,
            run.rig(Script.of(trace), expert_slots=1.0) as resident,
            run.drive() as drive,
        ):
            resident.fill()
            for rig in (ahead, plain):
                rig.decode(run.bench.warm_tokens)
            rates, computing = [], []
            for _ in run.rounds(f"lookahead of recall {recall}"):
                without.append(plain.decode(run.bench.tokens))
                turns.append(ahead.decode(run.bench.tokens))
                rounds.append(turns[-1].tokens_per_s / without[-1].tokens_per_s)
                rates.append(run.drive_rate(drive))
                computing.append(resident.decode(run.bench.tokens).seconds / run.bench.tokens)
            missed = sum(t.wanted_bytes for t in without) / sum(t.tokens for t in without)
            yield Figure.of(
                "lookahead",
                f"{_SLOTS}, reading takes as long as computing, recall {recall}",
                rounds,
                at_least=bar,
                model_bytes=ahead.model_bytes,
                ceilings={"disk_read_bytes_per_s": median(rates)},
                details={
                    "recall": mean_recall(turns),
                    "hit_rate": mean_hits(without),
                    "io_s": missed / median(rates),
                    "compute_s": median(computing),
                    "most_possible": _most_possible(missed / median(rates), median(computing)),
                },
                **traffic([*turns, *without]),
            )


def _most_possible(io_s: float, compute_s: float) -> float:
    """(I + C) / max(I, C): what perfect overlap would give."""
    return (io_s + compute_s) / max(io_s, compute_s)


def _balanced_hits(run: Run) -> float:
    """The hit rate at which missed bytes take the drive as long as a token takes in memory."""
    with (
        run.rig(Script.of(run.trace(stickiness=0.5)), expert_slots=1.0, prefetch="off") as rig,
        run.drive() as drive,
    ):
        rig.fill()
        rig.decode(run.bench.tokens)
        seconds = median([rig.decode(run.bench.tokens).seconds for _ in range(3)])
        rate = median([run.drive_rate(drive) for _ in range(3)])
    missed = rate * seconds / run.bench.tokens / run.token_bytes
    return min(0.95, max(SHARE, 1 - missed))


FIGURES: Mapping[str, Measure] = {
    "io_bound_decode": io_bound,
    "hits_85": nearly_resident,
    "lookahead": lookahead,
    "against_mmap": against_mmap,
    "sweep": sweep,
    "sweep_bytes": sweep_bytes,
    "peak_memory": peak_memory,
}
