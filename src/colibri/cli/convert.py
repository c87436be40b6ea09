"""`coli convert`: a checkpoint rewritten as a container, one expert in memory at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.checkpoint.container_manifest import PROGRESS
from colibri.checkpoint.convert import ConvertProgress, ConvertReport
from colibri.cli.options import JSON, with_environment
from colibri.cli.progress import Reporter
from colibri.formats import FORMATS
from colibri.llm.location import locate
from colibri.models.convert import convert_model
from colibri.units import format_bytes, format_seconds

KEEP = "keep"
_WORDS = f"{', '.join(FORMATS)}; {KEEP} leaves them as they are."

SOURCE = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Directory of a checkpoint, or OWNER/NAME in the cache."),
]
DESTINATION = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="Directory of the container: new, empty, or left by a run to resume."
    ),
]
EXPERTS = Annotated[
    str, typer.Option("--experts", metavar="FORMAT", help=f"Of routed experts: {_WORDS}")
]
DOWN = Annotated[
    str | None,
    typer.Option(
        "--down",
        metavar="FORMAT",
        help="Of the experts' down_proj, where rounding costs most; default: as --experts.",
    ),
]
DENSE = Annotated[
    str,
    typer.Option("--dense", metavar="FORMAT", help=f"Of dense matrices and embedding: {_WORDS}"),
]


@with_environment
def convert(
    source: SOURCE,
    destination: DESTINATION,
    *,
    experts: EXPERTS = "int4-g64",
    down: DOWN = None,
    dense: DENSE = KEEP,
    as_object: JSON = False,
) -> None:
    """Rewrite a checkpoint so that one expert is one aligned read.

    What is coded already is never rounded again. A run that was stopped goes on when the same
    command is run again.
    """
    with Reporter() as reporter:
        reporter(f"opening {source}", 0, 1)

        def follow(progress: ConvertProgress) -> None:
            reporter(f"opening {source}", 1, 1)
            reporter(f"writing {destination}", progress.done_bytes, progress.total_bytes)

        try:
            report = convert_model(
                locate(source),
                destination,
                experts=None if experts == KEEP else experts,
                down=down,
                dense=None if dense == KEEP else dense,
                progress=follow,
            )
        except KeyboardInterrupt:
            reporter.close()
            if (destination / PROGRESS).exists():
                print(stopped(destination), file=sys.stderr)
            raise
    if as_object:
        print(json.dumps(as_json(report)))
    else:
        print(summary(report), file=sys.stderr)


def stopped(destination: Path) -> str:
    """What to tell when a conversion is stopped."""
    found = any(destination.glob("*.safetensors"))
    what = f"what is finished is kept in {destination}" if found else "nothing was finished"
    go_on = "go on" if found else "begin anew"
    return (
        f"stopped; {what}: run the same command again to {go_on}, or remove "
        f"{'the directory' if found else destination}"
    )


def summary(report: ConvertReport) -> str:
    """One line: bytes before and after, time, what was kept of an earlier run, what left aside."""
    kept = f", {report.num_kept_layers} of them from an earlier run"
    parts = [f"{part} ({count} tensors)" for part, count in report.left_aside.items()]
    aside = f"; left aside: {', '.join(parts)}" if parts else ""
    return (
        f"{report.directory}: {format_bytes(report.total_bytes)} from "
        f"{format_bytes(report.source_bytes)} ({_change(report.ratio)}), "
        f"{report.num_layers} layers of experts{kept if report.num_kept_layers else ''}, "
        f"in {format_seconds(report.elapsed_s)}{aside}"
    )


def _change(ratio: float) -> str:
    return f"x {ratio:.2f} smaller" if ratio >= 1 else f"x {1 / ratio:.2f} larger"


def as_json(report: ConvertReport) -> dict[str, Any]:
    """What `coli convert --json` prints."""
    return {
        "model": str(report.directory),
        "num_layers": report.num_layers,
        "num_kept_layers": report.num_kept_layers,
        "source_bytes": report.source_bytes,
        "total_bytes": report.total_bytes,
        "ratio": report.ratio,
        "elapsed_s": report.elapsed_s,
        "left_aside": dict(report.left_aside),
    }
