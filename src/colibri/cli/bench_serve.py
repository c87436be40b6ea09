"""`coli bench serve`: clients of a server by the number, as a table, a plot and a file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from colibri.cli.bench_report import report
from colibri.cli.bench_streams import FIGURE, ROUNDS, figures_table
from colibri.cli.commands import Command
from colibri.cli.options import JSON, KERNELS, MEMORY, READING, with_some
from colibri.cli.progress import Reporter
from colibri.errors import RequestError
from colibri.lab.bench_serve import bench_serve
from colibri.lab.envelope import Envelope
from colibri.lab.serve_run import ServeBench
from colibri.settings import Settings
from colibri.settings.parsing import parse_count
from colibri.units import format_bytes

_SETTINGS = ("model", "eviction", "prefetch", "max_stall", *MEMORY, *KERNELS, *READING)
_WIDTH = 50
_CAPTION = """\
ttft: seconds to the first token. between: milliseconds from a token to the next. replies: whole
ones. memory: resident bytes of server and engine. Everything else: --json."""

SESSIONS = Annotated[
    str | None, typer.Option("--sessions", metavar="N,N…", help="Clients at the same time.")
]
CONTEXT = Annotated[
    str | None, typer.Option("--context", metavar="N,N…", help="Tokens of prompts, such as 1k,4k.")
]
DURATION = Annotated[
    float | None, typer.Option("--duration", min=1, metavar="SECONDS", help="Of each combination.")
]
TOKENS = Annotated[
    int | None, typer.Option("--tokens", min=8, metavar="N", help="Length of replies.")
]
CSV = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows of clients there.")
]
QUICK_SERVE = Annotated[
    bool, typer.Option("--quick", metavar="", help="Fewer clients, shorter prompts, three rounds.")
]


def add_serve(app: typer.Typer) -> None:
    """Give `coli bench` this command."""
    app.command("serve", cls=Command)(with_some(*_SETTINGS, notice=False)(serve))


def serve(
    *,
    as_object: JSON = False,
    quick: QUICK_SERVE = False,
    sessions: SESSIONS = None,
    context: CONTEXT = None,
    duration: DURATION = None,
    figure: FIGURE = None,
    pairs: ROUNDS = None,
    tokens: TOKENS = None,
    csv_file: CSV = None,
    settings: Settings,
) -> None:
    """Measure a server under load, over HTTP: speed, waiting, memory, and how near its limits.

    Takes the model that the settings name, else makes one of 4 GB in the cache directory, once.
    """
    given: dict[str, Any] = {
        "sessions": _counts("--sessions", sessions),
        "contexts": _counts("--context", context),
        "duration_s": duration,
        "figures": tuple(figure or ()),
        "pairs": pairs,
        "max_tokens": tokens,
    }
    bench = ServeBench().quick() if quick else ServeBench()
    bench = replace(bench, **{name: value for name, value in given.items() if value})
    with Reporter() as reporter:
        envelope = bench_serve(bench, settings, reporter)
    if csv_file is not None:
        _write(csv_file, _loads(envelope))
    report(envelope, as_object, tables(envelope), _CAPTION)


def _counts(name: str, text: str | None) -> tuple[int, ...]:
    """`1,2,4` or `1k,4k`: thousands are of 1,024."""
    found = []
    for word in (text or "").split(",") if text else ():
        unit = 1024 if word[-1:].lower() == "k" else 1
        try:
            found.append(unit * parse_count(word.rstrip("kK")))
        except ValueError as error:
            raise RequestError(f"{name} {text}: write numbers with commas: {error}") from None
    return tuple(found)


def _loads(envelope: Envelope) -> list[Mapping[str, Any]]:
    return [row for row in envelope.results if row["figure"] == "load"]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise RequestError(f"--csv {path}: no row of clients was measured (--figure load)")
    details = [{"tokens_per_s": row["value"], **row["details"]} for row in rows]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            names = [name for name in details[0] if not name.endswith("_interval")]
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(details)
    except OSError as error:
        raise RequestError(f"--csv {path}: {error.strerror}: name a file to write") from None


def tables(envelope: Envelope) -> Table:
    """Clients by the number with a plot of their speed, then the figures that have bars."""
    shown = Table.grid()
    loads = _loads(envelope)
    if loads:
        shown.add_row(load_table(loads))
        shown.add_row(plot(loads))
    others = [row for row in envelope.results if row["figure"] != "load"]
    if others:
        shown.add_row(figures_table(replace(envelope, results=others)))
    return shown


def load_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A combination a line."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    shown.add_column("clients", justify="right")
    for name in (
        "prompt",
        "tokens/s",
        "ttft p50",
        "p99",
        "between p50",
        "p99",
        "replies",
        "memory",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        told = row["details"]
        shown.add_row(
            str(told["sessions"]),
            f"{told['context']:,}",
            f"{row['value']:.2f}",
            _number(told["ttft_s_p50"], 1),
            _number(told["ttft_s_p99"], 1),
            _number(told["between_s_p50"], 1e3),
            _number(told["between_s_p99"], 1e3),
            str(told["replies"]),
            format_bytes(told["rss_bytes"]),
        )
    return shown


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second of all clients together, a bar a combination."""
    most = max(row["value"] for row in rows) or 1.0
    lines = [f"tokens/s, 0 to {most:.1f}"]
    for row in rows:
        told, length = row["details"], round(row["value"] / most * _WIDTH)
        where = f"{told['sessions']} x {told['context']:,}"
        lines.append(f"{where:>12} |{'#' * length:<{_WIDTH}}|")
    return "\n".join(lines)


def _number(value: float | None, scale: float) -> str:
    return "–" if value is None else f"{value * scale:.2f}"
