"""Clients in a closed loop: each asks for a reply, reads all of it, and asks for the next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.lab.bootstrap import quantile_interval
from colibri.lab.figure import Figure
from colibri.lab.serve_run import ServeRun
from colibri.lab.served import Cost, Heard, ServedProcess, Streaming

_LEAST_GAPS = 8  # that each client must have met, however long they take
_PATIENCE = 10  # times the duration
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What so many clients met.

    Attributes:
        seconds: measured, from the first request on.
        heard: replies of all clients.
        cost: of the processes meanwhile; `rss_bytes` at the end.
    """

    sessions: int
    context: int
    seconds: float
    heard: Sequence[Heard]
    cost: Cost

    @property
    def tokens(self) -> int:
        """That came."""
        return sum(sum(reply.tokens) for reply in self.heard)

    @property
    def gaps(self) -> list[float]:
        """Between tokens of a reply, of all replies."""
        return [gap for reply in self.heard for gap in reply.gaps]

    @property
    def first(self) -> list[float]:
        """Times to first tokens."""
        return [reply.ttft_s for reply in self.heard if reply.ttft_s is not None]

    def details(self) -> dict[str, Any]:
        """Everything by name; None where nothing came."""
        return {
            "sessions": self.sessions,
            "context": self.context,
            "replies": sum(reply.is_whole for reply in self.heard),
            "tokens": self.tokens,
            "seconds": self.seconds,
            **_quantiles("ttft_s", self.first),
            **_quantiles("between_s", self.gaps),
            "rss_bytes": self.cost.rss_bytes,
            "server_s_per_token": self.cost.server_s / max(1, self.tokens),
            "engine_s_per_token": self.cost.engine_s / max(1, self.tokens),
        }


def load_rows(run: ServeRun) -> Iterator[Figure]:
    """A row for each number of clients and length of prompts."""
    for context in run.bench.contexts:
        for sessions in run.bench.sessions:
            run.progress(f"{sessions} clients, prompts of {context}", 0, 1)
            found = _loaded(run, sessions, context)
            yield Figure(
                figure="load",
                regime=f"{sessions} clients, prompts of {found.context:,} tokens",
                value=found.tokens / found.seconds,
                details=found.details(),
                note=None if found.first else "no prompt was read in this time",
            )


def _loaded(run: ServeRun, sessions: int, context: int) -> Load:
    bench = run.bench
    positions = run.context(context + bench.max_tokens)
    context = min(context, positions - bench.max_tokens)
    with run.server(sessions, positions) as server:
        before, start = server.cost(), time.monotonic()
        every = [
            Streaming(server.address, run.prompts(context, bench.max_tokens, seed))
            for seed in range(sessions)
        ]
        _wait(every, bench.duration_s)
        seconds, cost = time.monotonic() - start, _spent(server, before)
        heard = [reply for client in every for reply in client.end()]
    end = start + seconds
    return Load(
        sessions=sessions,
        context=context,
        seconds=seconds,
        heard=[_until(reply, end) for reply in heard],
        cost=cost,
    )


def _wait(every: Sequence[Streaming], duration_s: float) -> None:
    """So long, then until each client has met a few tokens; not for ever."""
    start = time.monotonic()
    while (taken := time.monotonic() - start) < _PATIENCE * duration_s:
        met = all(max((len(h.gaps) for h in c.heard), default=0) >= _LEAST_GAPS for c in every)
        if taken >= duration_s and (met or not all(client.is_alive() for client in every)):
            return
        time.sleep(_POLL_S)


def _spent(server: ServedProcess, before: Cost) -> Cost:
    now = server.cost()
    return Cost(now.server_s - before.server_s, now.engine_s - before.engine_s, now.rss_bytes)


def _until(reply: Heard, end: float) -> Heard:
    """What of a reply had come by then."""
    count = sum(at <= end for at in reply.times)
    return Heard(reply.asked, reply.times[:count], reply.tokens[:count], reply.is_whole)


def _quantiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {f"{name}_p50": None, f"{name}_p99": None, f"{name}_p99_interval": None}
    return {
        f"{name}_p50": float(np.quantile(values, 0.5)),
        f"{name}_p99": float(np.quantile(values, 0.99)),
        f"{name}_p99_interval": quantile_interval(values, 0.99),
    }
