"""`coli bench disk | decode | prefill | roofline`: what streaming experts is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from colibri.cli.bench_report import report
from colibri.cli.commands import Command
from colibri.cli.options import JSON, KERNELS, READING, with_some
from colibri.cli.progress import Reporter
from colibri.errors import RequestError
from colibri.lab import (
    bench_convert,
    bench_decode,
    bench_disk,
    bench_prefill,
    bench_roofline,
)
from colibri.lab.envelope import Envelope
from colibri.lab.stream_bench import StreamBench
from colibri.settings import Settings

_CAPTION = """\
bar: the median reaches 0.97 of it, and the 90 % interval reaches it. device: bytes that the
system read for this process; engine: bytes that it counted itself. Speeds and limits: --json."""

_SETTINGS = ("model", "eviction", "prefetch", "profile", *KERNELS, *READING)

FIGURE = Annotated[
    list[str] | None,
    typer.Option("--figure", metavar="NAME", help="Only this one; may be given several times."),
]
ROUNDS = Annotated[
    int | None, typer.Option("--pairs", min=1, metavar="N", help="Rounds of each figure.")
]
TOKENS = Annotated[
    int | None, typer.Option("--tokens", min=1, metavar="N", help="Decoded in a round.")
]
WARM = Annotated[
    int | None, typer.Option("--warm", min=1, metavar="N", help="Decoded before the first round.")
]
REPLAY = Annotated[
    Path | None,
    typer.Option("--replay", metavar="FILE", help="Route as a file of --route-trace has it."),
]
QUICK_STREAM = Annotated[
    bool, typer.Option("--quick", metavar="", help="Every figure in fewer rounds, 3 by default.")
]

Bench = Callable[[StreamBench, Settings, Reporter], Envelope]


def add_streams(app: typer.Typer) -> None:
    """Give `coli bench` the commands of this file."""
    benches: Mapping[str, tuple[Bench, Sequence[str], str]] = {
        "decode": (bench_decode.bench_decode, tuple(bench_decode.FIGURES), _DECODE),
        "prefill": (bench_prefill.bench_prefill, tuple(bench_prefill.FIGURES), _PREFILL),
        "roofline": (bench_roofline.bench_roofline, tuple(bench_roofline.FIGURES), _ROOFLINE),
    }
    app.command("disk", cls=Command)(with_some("model", *READING, notice=False)(disk))
    app.command("convert", cls=Command)(with_some(*READING, notice=False)(convert))
    for name, (bench, figures, text) in benches.items():
        app.command(name, cls=Command)(
            with_some(*_SETTINGS, notice=False)(_command(bench, figures, text))
        )


def disk(
    *,
    as_object: JSON = False,
    quick: QUICK_STREAM = False,
    pairs: ROUNDS = None,
    settings: Settings,
) -> None:
    """Measure how fast the drive gives records, by size and number of reads.

    What reads fastest is remembered, and used from then on.
    """
    with Reporter() as reporter:
        envelope = bench_disk.bench_disk(_asked(quick, pairs=pairs), settings, reporter)
    report(envelope, as_object, disk_table(envelope))


def convert(
    *,
    as_object: JSON = False,
    quick: QUICK_STREAM = False,
    pairs: ROUNDS = None,
    settings: Settings,
) -> None:
    """Measure a conversion of bf16 to int4-g64 against reading and writing at the drive's rates.

    Takes a model of 4 GB as a hub has them, made in the cache directory once.
    """
    with Reporter() as reporter:
        envelope = bench_convert.bench_convert(_asked(quick, pairs=pairs), settings, reporter)
    report(envelope, as_object, figures_table(envelope))


_DECODE = """Measure decoding against what drive and memory allow.

    Takes the model that the settings name, else makes one of 4 GB in the cache directory, once.
    """
_PREFILL = """Measure prompts: bytes read, and the price of appending to a conversation.

    Takes the model that the settings name, else makes one of 4 GB in the cache directory, once.
    """
_ROOFLINE = """Measure steps against the slowest of drive, memory and arithmetic alone.

    Takes the model that the settings name, else makes one of 4 GB in the cache directory, once.
    """


def _command(bench: Bench, figures: Sequence[str], text: str) -> Callable[..., None]:
    def command(
        *,
        as_object: JSON = False,
        quick: QUICK_STREAM = False,
        figure: FIGURE = None,
        pairs: ROUNDS = None,
        tokens: TOKENS = None,
        warm: WARM = None,
        replay: REPLAY = None,
        settings: Settings,
    ) -> None:
        asked = _asked(quick, pairs=pairs, tokens=tokens, warm_tokens=warm, replay=replay)
        for name in figure or ():
            if name not in figures:
                raise RequestError(f"--figure {name}: known are {', '.join(figures)}")
        with Reporter() as reporter:
            envelope = bench(replace(asked, figures=tuple(figure or ())), settings, reporter)
        report(envelope, as_object, figures_table(envelope), _CAPTION)

    command.__doc__ = text
    return command


def _asked(quick: bool, **given: Any) -> StreamBench:
    bench = StreamBench().quick() if quick else StreamBench()
    return replace(bench, **{name: value for name, value in given.items() if value is not None})


def figures_table(envelope: Envelope) -> Table:
    """A figure a line."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    shown.add_column("figure", no_wrap=True)
    shown.add_column("regime")
    for name in ("value", "90 %", "bar", "", "device", "engine"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in envelope.results:
        shown.add_row(*_cells(row))
    return shown


def _cells(row: Mapping[str, Any]) -> list[str]:
    bars = [f">= {row['at_least']}"] if row["at_least"] is not None else []
    bars += [f"<= {row['at_most']}"] if row["at_most"] is not None else []
    device = row["device_bytes"]
    span = row["interval"]
    return [
        row["figure"],
        row["regime"] if row["note"] is None else f"{row['regime']}: {row['note']}",
        "" if row["value"] is None else f"{row['value']:.3f}",
        "" if span is None else f"{span[0]:.3f}–{span[1]:.3f}",
        " ".join(bars),
        {True: "holds", False: "missed", None: ""}[row["holds"]],
        "" if device is None else f"{device / 1e9:.2f} GB",
        f"{row['engine_bytes'] / 1e9:.2f} GB",
    ]


def disk_table(envelope: Envelope) -> Table:
    """A way of reading a line."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    shown.add_column("reads")
    for name in ("GB/s", "90 %", ""):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in envelope.results:
        if row["value"] is not None:
            low, high = row["interval"]
            chosen = "chosen" if row["details"]["chosen"] else ""
            span = f"{low / 1e9:.2f}–{high / 1e9:.2f}"
            shown.add_row(row["regime"], f"{row['value'] / 1e9:.2f}", span, chosen)
    return shown
