"""`coli bench`: figures that anybody can measure again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from colibri.cli.bench_report import report
from colibri.cli.bench_serve import add_serve
from colibri.cli.bench_streams import add_streams
from colibri.cli.commands import Command, new_app
from colibri.cli.options import JSON, KERNELS, with_some
from colibri.cli.progress import Reporter
from colibri.errors import RequestError
from colibri.formats import get_format
from colibri.lab.bench_call import CallBench, bench_call
from colibri.lab.bench_config import OPS, QUICK, KernelBench, Op, parse_shape
from colibri.lab.bench_kernels import bench_kernels
from colibri.lab.envelope import Envelope
from colibri.settings import Settings
from colibri.settings.parsing import parse_size

app = new_app(name="bench", help="Measure, and print the ceilings beside it.", no_args_is_help=True)
add_streams(app)
add_serve(app)

_CAPTION = """\
GB/s: weights read. limit: GB/s over what the same threads read without computing. parts: time of
the matrices one by one over time of the whole step. 90 %: interval of parts, else of limit.
Gop/s: multiplications and additions. error: rms, over the exact rms. peer: its time over ours,
with its own 90 % interval."""

QUICKLY = Annotated[
    bool, typer.Option("--quick", metavar="", help="Fewer cells, in about half a minute.")
]
OPERATION = Annotated[
    list[str] | None,
    typer.Option("--op", metavar="NAME", help=f"One of {', '.join(OPS)}; by default all."),
]
FORMAT = Annotated[
    list[str] | None, typer.Option("--format", metavar="NAME", help="Format of the weights.")
]
SHAPE = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME", help="A shape's name, or rows x columns such as 768x2048."
    ),
]
ROWS = Annotated[
    list[int] | None,
    typer.Option("--n", min=1, metavar="N", help="Rows of a matrix's input."),
]
PAIRS = Annotated[
    int | None, typer.Option("--pairs", min=1, metavar="N", help="Rounds of each figure.")
]
WORKING_SET = Annotated[
    str | None,
    typer.Option("--working-set", metavar="SIZE", help="Distinct weights that are gone through."),
]
POSITIONS = Annotated[
    int | None,
    typer.Option("--positions", min=1, metavar="N", help="Context that attention looks back on."),
]
PEER = Annotated[
    Path | None,
    typer.Option("--peer", metavar="LIBGGML", help="Driver of ggml; see benchmarks/README.md."),
]
STEPS = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Decode steps of each round.")
]


@app.command("kernels", cls=Command)
@with_some(*KERNELS)
def kernels(
    *,
    as_object: JSON = False,
    quick: QUICKLY = False,
    ops: OPERATION = None,
    formats: FORMAT = None,
    shapes: SHAPE = None,
    num_tokens: ROWS = None,
    pairs: PAIRS = None,
    working_set: WORKING_SET = None,
    positions: POSITIONS = None,
    peer: PEER = None,
    settings: Settings,
) -> None:
    """Measure the kernels against the limit of reading memory.

    Each figure is the median of rounds in which the same threads also read memory without
    computing, and goes through more distinct weights than caches hold.
    """
    given: dict[str, Any] = {
        "ops": _ops(ops),
        "formats": _formats(formats),
        "shapes": tuple(map(parse_shape, shapes or ())),
        "num_tokens": tuple(num_tokens or ()),
        "pairs": pairs,
        "working_set_bytes": None if working_set is None else _size(working_set),
        "num_positions": positions,
        "peer": peer,
        "activations": () if settings.activations is None else (settings.activations,),
    }
    bench = KernelBench(**(dict(QUICK) if quick else {}))
    if formats:
        bench = replace(bench, error_formats=())
    bench = replace(bench, **{name: value for name, value in given.items() if value})
    with Reporter() as reporter:
        envelope = bench_kernels(bench, settings, reporter)
    report(envelope, as_object, kernels_table(envelope), _CAPTION)


@app.command("call", cls=Command)
@with_some(*(name for name in Settings.names_for("bench") if name != "route_trace"))
def call(
    *, as_object: JSON = False, quick: QUICKLY = False, steps: STEPS = 32, settings: Settings
) -> None:
    """Measure Python's share of a decode step, accounted inside one run.

    Takes the model that the settings name or that came along, else one that it makes.
    """
    bench = CallBench(steps=min(steps, 8) if quick else steps)
    with Reporter() as reporter:
        envelope = bench_call(bench, settings, reporter)
    report(envelope, as_object, call_table(envelope))


def kernels_table(envelope: Envelope) -> Table:
    """Rates and shares as people read them; cells over all shapes stand out."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("op", "weights", "inputs", "n", "shape"):
        shown.add_column(name, no_wrap=True)
    for name in ("GB/s", "limit", "parts", "90 %", "Gop/s", "error", "peer", "90 %"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in envelope.results:
        style = "bold" if row["shape"] is None and row["rows"] is None else None
        shown.add_row(*_cells(row), style=style)
    return shown


def _cells(row: Mapping[str, Any]) -> list[str]:
    where = "all shapes" if row["rows"] is None else f"{row['rows']}x{row['columns']}"
    speed, error, peer = row["bytes_per_s"], row["error_rms"], row["peer_ratio"]
    return [
        row["op"],
        row["format"],
        row["activations"],
        str(row["n"]),
        where,
        "" if speed is None else f"{speed / 1e9:.1f}",
        _ratio(row["share_of_limit"]),
        _ratio(row["share_of_parts"]),
        _span(row["interval"]),
        "" if row["gops"] is None else f"{row['gops']:.0f}",
        "" if error is None else f"{error:.1e}",
        "" if peer is None else f"{peer:.2f}x",
        _span(row["peer_interval"]),
    ]


def call_table(envelope: Envelope) -> Table:
    """Where the time of a step goes."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    (row,) = envelope.results
    low, high = row["interval"]
    shown.add_row("model", f"{row['model']}, {row['num_layers']} layers")
    shown.add_row("step", f"{row['step_s'] * 1e3:.2f} ms, {1 / row['step_s']:.1f} tokens/s")
    shown.add_row(
        "native calls", f"{row['native_s'] * 1e3:.2f} ms, {row['native_calls']:.0f} calls"
    )
    cpu = f"{row['python_cpu_s'] * 1e3:.2f} ms of processor time"
    shown.add_row("Python", f"{row['python_s'] * 1e3:.2f} ms, {cpu}")
    shown.add_row("Python's share", f"{row['python_share']:.1%} ({low:.1%} to {high:.1%})")
    share = row["python_share_at_10_per_s"]
    shown.add_row("at 10 tokens/s", f"{share:.1%}, if as many layers took 100 ms")
    return shown


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _span(value: Sequence[float] | None) -> str:
    return "" if value is None else f"{value[0]:.2f}–{value[1]:.2f}"


def _ops(names: list[str] | None) -> tuple[Op, ...]:
    unknown = [name for name in names or () if name not in OPS]
    if unknown:
        raise RequestError(f"--op {unknown[0]}: known are {', '.join(OPS)}")
    return tuple(op for op in OPS if op in (names or ()))


def _formats(names: list[str] | None) -> tuple[str, ...]:
    return tuple(get_format(name).name for name in names or ())


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise RequestError(f"--working-set {text}: write {error}") from None
