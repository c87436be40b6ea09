"""`coli mirror`: copies of experts on other drives, so that more than one drive is read at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.checkpoint.experts import ExpertIndex
from colibri.checkpoint.index import Checkpoint
from colibri.cli.commands import Command, new_app
from colibri.cli.options import JSON, with_model
from colibri.cli.progress import Reporter
from colibri.errors import SettingsError
from colibri.llm.heat_keeper import open_usage
from colibri.llm.location import find_model, uses_bundled
from colibri.memory.staging import StagePlan, plan_stage, stage, verify_mirror
from colibri.models.description import Description
from colibri.settings import Settings
from colibri.settings.parsing import parse_size
from colibri.units import format_bytes

app = new_app(
    no_args_is_help=True,
    help="Keep copies of experts on other drives, so that more than one drive is read at once.",
)

DIRECTORY = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of the mirror, on another drive.")
]
BUDGET = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="What experts on the mirror may take; by default what is free."
    ),
]
RESERVE = Annotated[
    str, typer.Option(metavar="SIZE", help="What stays free on the mirror's drive.")
]


@app.command(cls=Command)
@with_model
def plan(
    directory: DIRECTORY,
    *,
    budget: BUDGET = None,
    reserve: RESERVE = "1GiB",
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Show which experts `stage` would copy: those used most first."""
    index, planned = _planned(settings, directory, budget, reserve)
    if as_object:
        print(json.dumps({**as_json(planned), "experts": _named(index, planned)}))
    else:
        print(summary(directory, planned))


@app.command(name="stage", cls=Command)
@with_model
def stage_command(
    directory: DIRECTORY,
    *,
    budget: BUDGET = None,
    reserve: RESERVE = "1GiB",
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Copy experts to the mirror. What is there stays; run it again to add more."""
    index, planned = _planned(settings, directory, budget, reserve)
    with Reporter() as reporter:
        title = f"writing {directory}"
        stage(index, directory, planned, lambda done, total: reporter(title, done, total))
    if as_object:
        print(json.dumps(as_json(planned)))
    else:
        held = planned.num_present + len(planned.records)
        print(
            f"{directory}: {held:,} of {planned.num_records:,} experts, "
            f"{format_bytes(planned.nbytes)} written; use it with --mirror {directory}",
            file=sys.stderr,
        )


@app.command(cls=Command)
@with_model
def verify(directory: DIRECTORY, *, as_object: JSON = False, settings: Settings) -> None:
    """Read every expert of a mirror and compare checksums."""
    if not directory.is_dir():
        raise SettingsError(
            f"{directory}: there is no such directory: name a mirror, or make one with "
            "`coli mirror stage`"
        )
    index = _describe(settings).experts
    with Reporter() as reporter:
        title = f"checking {directory}"
        num_records, nbytes = verify_mirror(
            index, directory, lambda done, total: reporter(title, done, total)
        )
    if as_object:
        facts = {"mirror": str(directory), "records": num_records, "bytes": nbytes, "ok": True}
        print(json.dumps(facts))
    else:
        told = f"{num_records:,} experts, {format_bytes(nbytes)}: all agree with the model"
        print(f"{directory}: {told}", file=sys.stderr)


def summary(directory: Path, planned: StagePlan) -> str:
    """What would be done, in words."""
    held = planned.num_present + len(planned.records)
    lines = [
        f"{directory}: {format_bytes(planned.free_bytes)} free, {planned.num_present:,} of "
        f"{planned.num_records:,} experts there",
        f"{len(planned.records):,} more would be copied, {format_bytes(planned.nbytes)}; "
        f"then {held / max(1, planned.num_records):.0%} of all experts",
    ]
    if planned.heat_share is None:
        lines.append("nothing is known of which experts are used: they go by number")
    else:
        lines.append(f"they served {planned.heat_share:.0%} of all uses so far")
    return "\n".join(lines)


def as_json(planned: StagePlan) -> dict[str, Any]:
    """The plan without its list of experts."""
    return {
        "num_to_copy": len(planned.records),
        "bytes": planned.nbytes,
        "num_present": planned.num_present,
        "num_experts": planned.num_records,
        "free_bytes": planned.free_bytes,
        "heat_share": planned.heat_share,
    }


def _named(index: ExpertIndex, planned: StagePlan) -> list[list[int]]:
    """Layer and expert of each record, hottest first."""
    rows = [divmod(record, index.file.shape[1]) for record in planned.records.tolist()]
    return [[index.layers[row].layer, expert] for row, expert in rows]


def _planned(
    settings: Settings, directory: Path, budget: str | None, reserve: str
) -> tuple[ExpertIndex, StagePlan]:
    if uses_bundled(settings) and (directory / "config.json").is_file():
        raise SettingsError(
            f"{directory} is a model, and a mirror is a directory for copies of its experts: write "
            f"`coli mirror plan --model {directory} MIRROR`"
        )
    description = _describe(settings)
    most = None if budget is None else _size("--budget", budget)
    heat = open_usage(description).counts
    index = description.experts
    return index, plan_stage(index, directory, heat, most, _size("--reserve", reserve))


def _describe(settings: Settings) -> Description:
    return Description.of(Checkpoint.open(find_model(settings), settings.family))


def _size(flag: str, text: str) -> int:
    try:
        return 0 if text == "0" else parse_size(text)
    except ValueError as error:
        raise SettingsError(f"{flag} is {text!r}: it must be {error}") from None
