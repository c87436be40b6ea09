"""Figures of `coli bench serve` about the pace of a stream: beside a prompt, and a busy server."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from colibri.lab.bootstrap import median, quantile_interval
from colibri.lab.figure import Figure
from colibri.lab.serve_run import ServeRun
from colibri.lab.served import ServedProcess, Streaming

_LONG, _SHORT, _CHUNK = 4096, 16, 8
_STALL, _ONE, _TWO, _PAUSE, _SHARE = 1.2, 1.1, 1.5, 3.0, 0.03
_P99 = 0.99
_LONE = 5  # chunks that are timed alone
_SAID = [{"role": "user", "content": "What do hummingbirds eat, and where? " * 40}] * 40
_POLL_S = 0.02


def stall(run: ServeRun) -> Iterator[Figure]:
    """Pauses of a running stream while a long prompt is read."""
    bench, limit = run.bench, run.settings.max_stall
    positions = run.context(_LONG + 2 * _CHUNK)
    prompt = min(_LONG, positions - 2 * _CHUNK)
    with run.server(2, positions) as server:
        lone = [_first_token_s(server, run, seed) for seed in range(_LONE)]
        stream = Streaming(server.address, run.prompts(_SHORT, positions - _SHORT))
        _until(stream, _CHUNK)
        run.progress(f"a stream beside a prompt of {prompt}", 0, 1)
        start = time.monotonic()
        other = Streaming(server.address, [next(run.prompts(prompt, 1, 99))])
        while not (other.heard and other.heard[0].times) and _lasts(start, bench.duration_s):
            time.sleep(_POLL_S)
        end = time.monotonic()
        read_s = next((heard.ttft_s for heard in other.end()), None)
        times = [at for heard in stream.end() for at in heard.times]
    gaps = [b - a for a, b in pairwise(times) if b > start and a < end]
    allowed = max(limit, median(lone))
    yield Figure(
        figure="stall",
        regime=f"p99 between tokens beside a prompt of {prompt:,}, over the pause allowed",
        at_most=_STALL,
        details={"max_stall_s": limit, "lone_chunk_s": median(lone), "prompt_s": read_s},
        note=None if read_s is not None else "the prompt was not read to its end in this time",
        **_pauses(gaps, allowed),
    )


def _pauses(gaps: Sequence[float], allowed: float) -> dict[str, Any]:
    """Value and interval of the figure, and their p99; nothing where no token came."""
    if not gaps:
        return {"value": None}
    low, high = quantile_interval(gaps, _P99)
    return {
        "value": float(np.quantile(gaps, _P99)) / allowed,
        "interval": (low / allowed, high / allowed),
        "rounds": tuple(gaps),
    }


def _lasts(start: float, seconds: float) -> bool:
    return time.monotonic() < start + seconds


def _first_token_s(server: ServedProcess, run: ServeRun, seed: int) -> float:
    """Of a prompt of one small chunk that is alone."""
    stream = Streaming(server.address, [next(run.prompts(_CHUNK, 1, 100 + seed))])
    stream.join()
    (heard,) = stream.end()
    assert heard.ttft_s is not None
    return heard.ttft_s


def _until(stream: Streaming, tokens: int) -> None:
    """Wait for so many tokens more, of whatever reply."""
    wanted = sum(len(heard.times) for heard in stream.heard) + tokens
    while stream.is_alive() and sum(len(heard.times) for heard in stream.heard) < wanted:
        time.sleep(_POLL_S)
    if not stream.is_alive():
        stream.end()


class Busy:
    """Keeps a server rendering templates and parsing JSON without pause; use it in `with`."""

    def __init__(self, server: ServedProcess) -> None:
        self._address, self._ends = server.address, threading.Event()
        self._name = server.get("/v1/models")["data"][0]["id"]
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]
        self.count = 0

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(*self._address)
        path = "/v1/messages/count_tokens"
        body = json.dumps({"model": self._name, "messages": _SAID})
        while not self._ends.is_set():
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
            self.count += 1
            if response.status != 200:  # no chat template: text alone
                path, body = "/tokenize", json.dumps({"prompt": _SAID[0]["content"] * 40})

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


class Steps(NamedTuple):
    """Decode steps of a stretch of time, from the engine's own trace.

    Attributes:
        taken: `[S]` seconds from the beginning of each to that of the next.
        native: `[S]` of these, seconds inside of native calls.
    """

    taken: NDArray[np.float64]
    native: NDArray[np.float64]


def steps_of(trace: Sequence[Mapping[str, Any]], start: float, end: float) -> Steps:
    """The steps of a Chrome trace (`spans.Spans`) between two times of the monotonic clock."""
    began = next(e["args"]["monotonic_ns"] for e in trace if e.get("name") == "began") / 1e9
    spans = [event for event in trace if event.get("ph") == "X"]
    forward = [e for e in spans if e["name"] == "forward" and e["args"]["rows"] == 1]
    passes = [e["ts"] / 1e6 + began for e in forward]
    begins = np.array([at for at in passes if start <= at < end])
    kernels = [e for e in spans if e["cat"] == "kernel"]
    at = np.array([e["ts"] / 1e6 + began for e in kernels])
    of = np.searchsorted(begins, at, side="right") - 1
    inside = (of >= 0) & (of < len(begins) - 1)
    lasted = np.array([e["dur"] / 1e6 for e in kernels])
    native = np.bincount(of[inside], lasted[inside], minlength=max(0, len(begins) - 1))
    return Steps(np.diff(begins), native.astype(np.float64))


@contextmanager
def _traced(run: ServeRun, **changes: Any) -> Iterator[tuple[ServedProcess, Callable[[], Any]]]:
    """A server, all experts in memory, and what its engine wrote down, once it is closed."""
    with TemporaryDirectory(prefix="coli-bench-") as folder:
        path = Path(folder) / "trace.json"
        changes = {"expert_slots": 1.0, "profile": str(path), **changes}
        with run.server(1, _positions(run), **changes) as server:
            yield server, lambda: json.loads(path.read_text(encoding="utf-8"))


def _positions(run: ServeRun) -> int:
    """Of one reply that lasts for all rounds."""
    return run.context(_SHORT + 4 * (run.bench.pairs + 1) * run.bench.steps)


def _long_stream(server: ServedProcess, run: ServeRun) -> Streaming:
    stream = Streaming(server.address, run.prompts(_SHORT, _positions(run) - _SHORT))
    _until(stream, run.bench.steps)
    return stream


def one_thread(run: ServeRun) -> Iterator[Figure]:
    """p99 of decode steps beside a busy server over that of the engine alone, on one thread."""
    yield from _beside_busy(run, 1)


def two_threads(run: ServeRun) -> Iterator[Figure]:
    """The median likewise where the engine has its usual threads, and whence long pauses come."""
    yield from _beside_busy(run, run.settings.threads)


def _beside_busy(run: ServeRun, threads: int | None) -> Iterator[Figure]:
    bench, spans = run.bench, []
    with _traced(run, threads=threads) as (server, trace):
        stream, at = _long_stream(server, run), time.monotonic()
        for _ in run.rounds(f"decoding beside a busy server, threads: {threads or 'usual'}"):
            _until(stream, bench.steps)
            between = time.monotonic()
            with Busy(server):
                _until(stream, bench.steps)
                end = time.monotonic()
            spans.append((at, between, end))
            at = time.monotonic()
        stream.end()
        server.close()
        events = trace()
    alone = [steps_of(events, a, b) for a, b, _ in spans]
    busy = [steps_of(events, b, c) for _, b, c in spans]
    yield from (_one if threads == 1 else _usual)(alone, busy)


def _one(alone: Sequence[Steps], busy: Sequence[Steps]) -> Iterator[Figure]:
    pairs = list(zip(alone, busy, strict=True))
    yield Figure.of(
        "one_thread",
        "p99 of decode steps beside a busy server over alone, threads 1",
        [_quantile(b) / _quantile(a) for a, b in pairs],
        at_most=_ONE,
        details=_told(alone, busy),
    )


def _usual(alone: Sequence[Steps], busy: Sequence[Steps]) -> Iterator[Figure]:
    pairs = list(zip(alone, busy, strict=True))
    yield Figure.of(
        "two_threads",
        "median of decode steps beside a busy server over alone, usual threads",
        [float(np.median(b.taken) / np.median(a.taken)) for a, b in pairs],
        at_most=_TWO,
        details=_told(alone, busy),
    )
    taken = np.concatenate([steps.taken for steps in busy])
    native = np.concatenate([steps.native for steps in busy])
    usual = float(np.median(taken))
    long = taken > _PAUSE * usual
    yield Figure(
        figure="pauses",
        regime=f"steps over {_PAUSE:g} medians for what is not native: GIL, pipe, Python",
        value=float(np.count_nonzero(long & (native <= _PAUSE * usual))),
        at_most=0.0,
        details={
            "steps": len(taken),
            "long": int(np.count_nonzero(long)),
            "most_outside_s": float((taken - native).max()),
            "median_s": usual,
        },
    )


def _quantile(steps: Steps) -> float:
    return float(np.quantile(steps.taken, _P99))


def _told(alone: Sequence[Steps], busy: Sequence[Steps]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, every in (("alone", alone), ("busy", busy)):
        taken = np.concatenate([steps.taken for steps in every])
        found[f"{name}_p50_s"] = float(np.median(taken))
        found[f"{name}_p99_s"] = float(np.quantile(taken, _P99))
        found[f"{name}_steps"] = len(taken)
    return found


def server_share(run: ServeRun) -> Iterator[Figure]:
    """Processor time of the server's process in a decode step, over the step."""
    bench, rounds, told = run.bench, [], []
    with run.server(1, _positions(run), expert_slots=1.0) as server:
        stream = _long_stream(server, run)
        for _ in run.rounds("the server's share of a step"):
            before, heard, at = server.cost(), _count(stream), time.monotonic()
            _until(stream, bench.steps)
            after, seconds = server.cost(), time.monotonic() - at
            tokens = _count(stream) - heard
            rounds.append((after.server_s - before.server_s) / seconds)
            told.append(((after.server_s - before.server_s) / tokens, seconds / tokens))
        stream.end()
    yield Figure.of(
        "server_share",
        "processor time of the server's process over time of a decode step, one stream",
        rounds,
        at_most=_SHARE,
        details={
            "server_s_per_token": median([each[0] for each in told]),
            "step_s": median([each[1] for each in told]),
        },
    )


def _count(stream: Streaming) -> int:
    return sum(len(heard.times) for heard in stream.heard)


Measure = Callable[[ServeRun], Iterator[Figure]]
FIGURES: Mapping[str, Measure] = {
    "stall": stall,
    "one_thread": one_thread,
    "two_threads": two_threads,
    "server_share": server_share,
}
