"""`coli bench prefill`: prompts read each expert once, and appending costs what a prompt costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from colibri.engine.session import Session
from colibri.kernels.api import KV_BLOCK
from colibri.lab.bench_model import Progress, hub_model, with_model
from colibri.lab.envelope import Envelope
from colibri.lab.figure import Figure
from colibri.lab.rig import Rig, Stretch, routed
from colibri.lab.routed import Script
from colibri.lab.stream_bench import SHARE, Measure, Run, StreamBench, measure, traffic
from colibri.llm.loading import prepare
from colibri.settings import Settings

SCHEMA = "colibri.bench.prefill/1"
_APPENDED = 200
_ONE_BY_ONE = 24  # of the appended tokens are decoded; the rest would take as long each
_STICKY = 0.5
_LONGEST_CONTEXT = 1024
_ROUNDING = 2 * KV_BLOCK  # two sessions share the pool


def bench_prefill(bench: StreamBench, settings: Settings, progress: Progress) -> Envelope:
    """Measure what `bench` says; see `stream_bench.measure` for what it raises."""
    return measure(SCHEMA, FIGURES, bench, with_model(settings, progress), progress)


def container_bytes(run: Run) -> Iterator[Figure]:
    """Bytes read for prompts over those of their union less what was there."""
    yield _union(run, "prefill_bytes", "container", 1.0)


def hub_bytes(run: Run) -> Iterator[Figure]:
    """The same from files as a hub has them, whose pieces are not aligned."""
    settings = hub_model(run.settings, run.progress, run.bench.hub_shape)
    other = replace(run, settings=settings, prepared=routed(prepare(settings)), sampled={})
    yield _union(other, "prefill_bytes", "files of a hub, in 16 bits", 1.02)


def _union(run: Run, name: str, regime: str, bar: float) -> Figure:
    script = Script.of(run.trace(stickiness=_STICKY))
    context = _context(run, run.bench.prompt_tokens + 1)
    prompt_tokens = min(run.bench.prompt_tokens, context - 1)
    rounds, turns = [], []
    with run.rig(script, context_length=context, prefill_chunk=prompt_tokens) as rig:
        for _ in run.rounds(f"prompts from the {regime}"):
            wanted = _union_size(script, prompt_tokens)
            turn = rig.prefill(rig.random_ids(prompt_tokens))
            hits = turn.counts.requests - turn.counts.misses
            read = turn.engine_bytes if turn.device_bytes is None else turn.device_bytes
            rounds.append(read / max(1, (wanted - hits) * rig.record_bytes))
            turns.append(turn)
        return Figure.of(
            name,
            f"{regime}: {prompt_tokens} tokens in one pass, {SHARE:.0%} of the experts in memory",
            rounds,
            at_most=bar,
            model_bytes=rig.model_bytes,
            details={
                "tokens_per_s": float(np.median([turn.tokens_per_s for turn in turns])),
                "hit_rate": 1 - sum(t.counts.misses for t in turns)
                / sum(t.counts.requests for t in turns),
            },
            **traffic(turns),
        )  # fmt: skip


def _union_size(script: Script, num_tokens: int) -> int:
    """Experts that the next tokens choose, over all layers."""
    ids = script.coming(num_tokens)
    return sum(len(np.unique(ids[:, row])) for row in range(ids.shape[1]))


def append(run: Run) -> Iterator[Figure]:
    """Tokens behind a long context against a prompt of as many, and against one after another."""
    script = Script.of(run.trace(stickiness=_STICKY), 0.72)
    room = _context(run, _LONGEST_CONTEXT + 2 * _APPENDED + _ONE_BY_ONE + _ROUNDING)
    appended, decoded = min(_APPENDED, room // 6), min(_ONE_BY_ONE, room // 8)
    older = room - 2 * appended - decoded - _ROUNDING
    fresh, behind, singles = [], [], []
    with run.rig(script, context_length=room) as rig, rig.llm.open_session() as session:
        ids = rig.random_ids(older + appended)
        rig.prefill(ids[:older], session)
        for number in run.rounds("appending to a conversation"):
            for which in (0, 1) if number % 2 else (1, 0):
                script.seek(0)  # the same experts for both
                if which:
                    fresh.append(rig.prefill(ids[older:]))
                else:
                    behind.append(_appended(rig, session, ids, older))
            singles.append(_one_by_one(rig, session, decoded))
            session.rewind(older)
        yield from _judged(rig, fresh, behind, singles, older)


def _appended(rig: Rig, session: Session, ids: list[int], older: int) -> Stretch:
    turn = rig.prefill(ids, session)
    session.rewind(older)
    return turn


def _one_by_one(rig: Rig, session: Session, count: int) -> float:
    """Seconds a token, decoded behind the same context."""
    turns = [rig.prefill([*session.ids, *rig.random_ids(1)], session) for _ in range(count)]
    return sum(turn.seconds for turn in turns) / count


def _judged(
    rig: Rig, fresh: list[Stretch], behind: list[Stretch], singles: list[float], older: int
) -> Iterator[Figure]:
    pairs = list(zip(fresh, behind, strict=True))
    where = f"{behind[0].tokens} tokens behind {older:,}"
    common = {"model_bytes": rig.model_bytes, **traffic([*fresh, *behind])}
    slots = f"{SHARE:.0%} of the experts in memory"
    yield Figure.of(
        "append_bytes",
        f"{where}, over a prompt of as many; {slots}",
        [b.engine_bytes / max(1, f.engine_bytes) for f, b in pairs],
        at_most=1.15,
        **common,
    )
    yield Figure.of(
        "append_time",
        f"{where}, less attention to those, over a prompt of as many; {slots}",
        [(b.seconds - b.attention_s + f.attention_s) / f.seconds for f, b in pairs],
        at_most=1.15,
        details={"seconds": float(np.median([b.seconds for b in behind]))},
        **common,
    )
    yield Figure.of(
        "append_decoded",
        f"{where}, over decoding them one by one; {slots}",
        [b.seconds / (b.tokens * s) for b, s in zip(behind, singles, strict=True)],
        at_most=0.2,
        details={"decoded_s_per_token": float(np.median(singles))},
        **common,
    )


def _context(run: Run, wanted: int) -> int:
    return min(wanted, run.prepared.config.max_position_embeddings)


FIGURES: Mapping[str, Measure] = {
    "prefill_bytes": container_bytes,
    "prefill_bytes_hub": hub_bytes,
    "append": append,
}
