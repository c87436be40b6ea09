"""A look into a running model: slots, queues, sessions, and what became of reads ahead."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from colibri.engine.engine import Engine
from colibri.memory.jobs import Queue
from colibri.models.model import Model


def inspected(engine: Engine, model: Model) -> dict[str, Any]:
    """The state of now.

    `slots` are those of each size; `queues` count records that wait and what is being read;
    `sessions` are the positions reached; `ahead` says what became of every byte that was read ahead
    (`memory.store_stats.AheadBytes`); `metrics` are those of the engine.
    """
    stats, foresight = model.store.stats, model.prefetcher.stats
    *queues, reading = model.store.queues()
    queued = {queue.name.lower(): queues[queue] for queue in Queue}
    return {
        "slots": model.store.slot_states(),
        "retired_bytes": model.store.retired_bytes,
        "queues": queued | {"reading": reading},
        "sessions": [{"position": position} for position in engine.positions],
        "ahead": {
            "looking": model.prefetcher.governor.depth,
            "predicted": asdict(stats.predicted),
            "warmed": asdict(stats.warmed),
            **asdict(foresight),
        },
        "store": asdict(stats),
        "metrics": asdict(engine.metrics()),
    }
