"""`/health`, `/stats` and `/metrics`: how the server and the engine are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import colibri
from colibri.engine.metrics import Metrics
from colibri.engine.service import Health
from colibri.errors import EngineDiedError
from colibri.memory.budget import process_rss
from colibri.server.serving import Call, Serving

_GAUGES = {
    *("num_running", "num_waiting", "num_prefixes", "num_unsaved", "kv_blocks", "kv_free_blocks"),
    *("rss_bytes", "peak_rss_bytes", "ram_budget_bytes"),
}
"""Figures that fall too; all others only grow."""


async def health(call: Call) -> ASGIApp:
    """200 where requests are served, 503 where not; alive in both cases."""
    engine = call.serving.engine
    is_ready = engine.health is Health.READY
    told: dict[str, Any] = {
        "status": "ok" if is_ready else str(engine.health),
        "ready": is_ready,
        "in_flight": engine.num_in_flight,
    }
    if engine.failure is not None:
        told["failure"] = str(engine.failure)
    return JSONResponse(told, 200 if is_ready else 503)


async def stats(call: Call) -> ASGIApp:
    """Everything as one JSON object."""
    serving = call.serving
    metrics = await _metrics(serving)
    counters = serving.counters
    return JSONResponse(
        {
            "version": colibri.__version__,
            "model": serving.model.name,
            "dialect": serving.model.calls_as,
            "chat_template": serving.model.template is not None,
            "health": serving.engine.health,
            "engine": None if metrics is None else asdict(metrics),
            "server": {
                "in_flight": counters.in_flight,
                "disconnects": counters.disconnects,
                "rss_bytes": process_rss(),
                "answers": [
                    {"path": path, "status": status, "count": count}
                    for (path, status), count in sorted(counters.answers.items())
                ],
            },
        }
    )


async def metrics(call: Call) -> ASGIApp:
    """Everything as Prometheus reads it."""
    registry = CollectorRegistry(auto_describe=False)
    found = await _metrics(call.serving)
    registry.register(_Collected([*_of_server(call.serving), *_of_engine(found)]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _metrics(serving: Serving) -> Metrics | None:
    try:
        return await serving.engine.metrics()
    except EngineDiedError:
        return None


class _Collected:
    """Metrics that were collected already."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


def _of_server(serving: Serving) -> Iterator[Metric]:
    counters, engine = serving.counters, serving.engine
    yield GaugeMetricFamily(
        "colibri_ready", "Whether requests are served.", float(engine.health is Health.READY)
    )
    yield GaugeMetricFamily(
        "colibri_requests_in_flight", "Requests at the engine.", engine.num_in_flight
    )
    yield CounterMetricFamily(
        "colibri_client_disconnects", "Clients that left early.", counters.disconnects
    )
    answers = CounterMetricFamily(
        "colibri_http_answers", "Answers by path and status.", labels=["path", "status"]
    )
    for (path, status), count in sorted(counters.answers.items()):
        answers.add_metric([path, str(status)], count)
    yield answers
    yield GaugeMetricFamily(
        "colibri_server_rss_bytes", "Memory of the server's process.", process_rss()
    )


def _of_engine(metrics: Metrics | None) -> Iterator[Metric]:
    """One metric for every number of the snapshot; times in seconds, sizes in bytes."""
    if metrics is None:
        return
    values = asdict(metrics)
    experts = values.pop("experts")
    lossy = values.pop("lossy")
    yield InfoMetricFamily(
        "colibri_engine", "Settings that trade accuracy.", {"lossy": ",".join(lossy)}
    )
    for name, value in {**values, **{f"experts_{k}": v for k, v in experts.items()}}.items():
        if not isinstance(value, int | float):
            continue
        kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
        yield kind(f"colibri_{name}", f"{name.replace('_', ' ')} of the engine.", float(value))
