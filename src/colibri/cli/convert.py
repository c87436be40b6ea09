"""`coli convert`: a checkpoint rewritten as a container, one expert in memory at a time."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.checkpoint.container_manifest import MANIFEST, PROGRESS, Manifest
from colibri.checkpoint.conversion import Conversion, Part
from colibri.checkpoint.convert import ConvertProgress, ConvertReport
from colibri.checkpoint.convert import convert as write_container
from colibri.checkpoint.pace import estimate_s
from colibri.checkpoint.repair import repair as repair_container
from colibri.cli.options import JSON, with_environment
from colibri.cli.progress import Rate, Reporter
from colibri.formats import FORMATS
from colibri.llm.location import locate
from colibri.models.convert import Formats, plan_conversion, plan_repair
from colibri.text.gguf_vocabulary import documents
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
HEAD = Annotated[
    str | None,
    typer.Option("--head", metavar="FORMAT", help="Of the output matrix; default: as --dense."),
]
MTP = Annotated[
    str,
    typer.Option(
        "--mtp",
        metavar="FORMAT",
        help="Of heads that draft further tokens, where there are any; none leaves them aside.",
    ),
]
IMPORTANCE = Annotated[
    Path | None,
    typer.Option(
        "--importance",
        metavar="FILE",
        help="What `coli eval importance` wrote: scales of experts then spare what matters.",
    ),
]
REPAIR = Annotated[
    bool,
    typer.Option(
        "--repair",
        metavar="",
        help="Make only what is damaged in DST anew, in its own formats; SRC is what it was "
        "converted from.",
    ),
]
PLAN = Annotated[bool, typer.Option("--plan", metavar="", help="Only print what it would do.")]


@with_environment
def convert(
    source: SOURCE,
    destination: DESTINATION,
    *,
    experts: EXPERTS = "int4-g64",
    down: DOWN = None,
    dense: DENSE = KEEP,
    head: HEAD = None,
    mtp: MTP = "int8-g64",
    importance: IMPORTANCE = None,
    plan: PLAN = False,
    repair: REPAIR = False,
    as_object: JSON = False,
) -> None:
    """Rewrite a checkpoint so that one expert is one aligned read.

    What is coded already is never rounded again. A run that was stopped goes on when the same
    command is run again.
    """
    if repair:
        _repair(locate(source), destination, importance, as_object)
        return
    formats = Formats(*map(_chosen, (experts, down, dense, head, mtp)))
    with Reporter() as reporter:
        reporter(f"opening {source}", 0, 1)
        conversion = plan_conversion(locate(source), formats, importance)
        reporter(f"opening {source}", 1, 1)
        seconds = estimate_s(conversion)
        reporter.close()
        if plan and as_object:
            print(json.dumps(plan_as_json(conversion, seconds)))
        elif not as_object:
            print(planned(conversion, seconds), file=sys.stdout if plan else sys.stderr)
        if plan:
            return
        report = _run(conversion, destination, reporter)
    if as_object:
        print(json.dumps(as_json(report)))
    else:
        print(summary(report), file=sys.stderr)


def _repair(source: Path, directory: Path, importance: Path | None, as_object: bool) -> None:
    with Reporter() as reporter:
        reporter(f"opening {source}", 0, 1)
        manifest = Manifest.read(directory / MANIFEST)
        conversion = plan_repair(source, manifest, importance)
        reporter(f"opening {source}", 1, 1)
        stage = f"repairing {directory}"
        found = repair_container(
            conversion, directory, manifest, lambda *counts: reporter(stage, *counts)
        )
    if as_object:
        print(json.dumps({"model": str(directory), **asdict(found)}))
        return
    parts = [
        *(f"expert {expert} of layer {layer}" for layer, expert in found.records),
        *found.files,
    ]
    told = f"made anew: {', '.join(parts)}" if parts else "nothing is damaged"
    print(f"{directory}: {told}", file=sys.stderr)


def _chosen(name: str | None) -> str | None:
    return None if name == KEEP else name


def _run(conversion: Conversion, destination: Path, reporter: Reporter) -> ConvertReport:
    meter = Rate()

    def follow(progress: ConvertProgress) -> None:
        done, total = progress.done_bytes, progress.total_bytes
        reporter(f"writing {destination}", done, total, meter.told(done, total))

    try:
        source = conversion.checkpoint.gguf
        beside = None if source is None else documents(source)
        return write_container(conversion, destination, progress=follow, documents=beside)
    except KeyboardInterrupt:
        reporter.close()
        if (destination / PROGRESS).exists():
            print(stopped(destination), file=sys.stderr)
        raise


def planned(conversion: Conversion, seconds: float) -> str:
    """A line for each part, with formats and sizes, and one for all of it."""
    parts = conversion.parts()
    rows = [
        (part.name, f"{', '.join(part.source_formats)} to {', '.join(part.formats)}", *_sizes(part))
        for part in parts
    ]
    before, after = sum(p.source_bytes for p in parts), sum(p.total_bytes for p in parts)
    ratio = _change(before / max(after, 1))
    total = f"{ratio}, about {format_seconds(seconds)}"
    rows.append(("in all", total, format_bytes(before), format_bytes(after)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {formats:<{widths[1]}}  {old:>{widths[2]}} -> {new:>{widths[3]}}"
        for name, formats, old, new in rows
    ]
    if after > before:
        lines.append(
            f"the container will be larger than its source by {format_bytes(after - before)}"
        )
    return "\n".join(lines)


def _sizes(part: Part) -> tuple[str, str]:
    return format_bytes(part.source_bytes), format_bytes(part.total_bytes)


def plan_as_json(conversion: Conversion, seconds: float) -> dict[str, Any]:
    """What `coli convert --plan --json` prints."""
    return {
        "source": str(conversion.checkpoint.place),
        "source_bytes": conversion.source_bytes,
        "total_bytes": conversion.total_bytes,
        "estimate_s": seconds,
        "parts": [asdict(part) for part in conversion.parts()],
        "left_aside": dict(conversion.left_aside),
    }


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
