"""`coli top`: what a running server does, second by second."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.options import JSON, with_some
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.lab.watch import Sight, Watched

URL = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="Address of the server; by default that of `coli serve`."),
]
INTERVAL = Annotated[
    float,
    typer.Option("--interval", min=0.05, metavar="SECONDS", help="From one look to the next."),
]
COUNT = Annotated[
    int | None,
    typer.Option("--count", min=1, metavar="N", help="Looks; by default until Ctrl-C."),
]
_BARS = 24


@with_some("host", "port", "api_key", notice=False)
def top(
    url: URL = None,
    *,
    interval: INTERVAL = 1.0,
    count: COUNT = None,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Watch a running server: speed, hits, reads, conversations and memory.

    On a terminal it draws anew until Ctrl-C; elsewhere, or with --json, it prints a line a look.
    """
    from colibri.lab.watch import Watched

    watched = Watched(url or f"{settings.host}:{settings.port}", settings.api_key)
    sights = _looks(watched, interval, count)
    try:
        if as_object:
            for sight in sights:
                print(json.dumps(asdict(sight)), flush=True)
        else:
            _draw(sights, watched.host)
    except KeyboardInterrupt:
        return  # the usual way to leave


def _looks(watched: Watched, interval: float, count: int | None) -> Iterator[Sight]:
    from colibri.lab.watch import Sight

    before, at = watched.look(), time.monotonic()
    while count is None or count > 0:
        time.sleep(interval)
        now, then = watched.look(), time.monotonic()
        yield Sight.between(before, now, then - at)
        before, at, count = now, then, None if count is None else count - 1


def _draw(sights: Iterator[Sight], host: str) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for sight in sights:
            print(line(sight), flush=True)
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for sight in sights:
            live.update(table(sight, host), refresh=True)


def line(sight: Sight) -> str:
    """One look in one line."""
    return (
        f"{_number(sight.decode_tokens_per_s)} tokens/s, prompts "
        f"{_number(sight.prompt_tokens_per_s)} tokens/s, hits {_share(sight.hit_rate)}, read "
        f"{format_bytes(sight.disk_bytes_per_s)}/s, {sight.num_running} running, "
        f"{sight.num_waiting} waiting, {format_bytes(sight.rss_bytes)} of "
        f"{format_bytes(sight.budget_bytes)}"
    )


def table(sight: Sight, host: str) -> Table:
    """One look as a terminal shows it."""
    from rich.table import Table

    shown = Table(
        title=f"{sight.model} at {host}: {sight.health}",
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    memory = sight.rss_bytes / sight.budget_bytes if sight.budget_bytes else 0.0
    read, wasted = format_bytes(sight.disk_bytes_per_s), format_bytes(sight.wasted_bytes_per_s)
    rows = [
        ("replies", f"{_number(sight.decode_tokens_per_s)} tokens/s", ""),
        ("prompts", f"{_number(sight.prompt_tokens_per_s)} tokens/s", ""),
        ("expert hits", _share(sight.hit_rate), bar(sight.hit_rate)),
        ("foreseen", _share(sight.recall), bar(sight.recall)),
        ("read", f"{read}/s", f"{wasted}/s of it for nothing" if sight.wasted_bytes_per_s else ""),
        ("running", f"{sight.num_running}", f"{sight.num_waiting} waiting"),
        ("conversations", f"{sight.num_prefixes}", "kept"),
        ("keys and values", _share(sight.kv_share), bar(sight.kv_share)),
        ("memory", format_bytes(sight.rss_bytes), f"{bar(memory)} of the budget"),
        ("left early", f"{sight.disconnects}", f"{sight.refused} requests refused"),
    ]
    for row in rows:
        shown.add_row(*row)
    if sight.lossy:
        shown.add_row("lossy", ", ".join(sight.lossy), "")
    return shown


def bar(share: float | None) -> str:
    """A share of 24 blocks."""
    filled = round(_BARS * min(1.0, max(0.0, share or 0.0)))
    return "█" * filled + "░" * (_BARS - filled)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
