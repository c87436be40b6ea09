"""`coli pull`: a model from the hub, in the shared cache or a directory."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.checkpoint.hub.names import parse_name
from colibri.cli.options import JSON, KERNELS, MEMORY, with_some
from colibri.cli.progress import Reporter
from colibri.cli.spelling import flag
from colibri.errors import SettingsError
from colibri.settings import Settings
from colibri.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibri.checkpoint.hub.meter import PullProgress
    from colibri.checkpoint.hub.pull import PullReport
    from colibri.checkpoint.hub.repository import HubFile, Listing

_PLANNED = ("family", *MEMORY, *KERNELS)
_SILENT_S = 2.0  # from which on it is told

REPOSITORY = Annotated[
    str,
    typer.Argument(metavar="REPO[@REVISION]", help="OWNER/NAME, at a branch, a tag or a commit."),
]
DIRECTORY = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Where plain files go; by default the shared cache."),
]
INCLUDE = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only files whose names match, as in '*Q4_K_M*'; may be given several times. By "
        "default all that a model is read from.",
    ),
]
FORCE = Annotated[
    bool, typer.Option("--force", metavar="", help="Fetch again what is there already.")
]
PLAN = Annotated[
    bool,
    typer.Option(
        "--plan",
        metavar="",
        help="Fetch config and headers only, and say what the model would need here. The settings "
        "below are for this.",
    ),
]


@with_some(*_PLANNED, notice=False)
def pull(
    repository: REPOSITORY,
    *,
    directory: DIRECTORY = None,
    include: INCLUDE = None,
    force: FORCE = False,
    plan: PLAN = False,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Fetch a model from the hub, or say what it would do here.

    Every file is checked against the digest that the hub gives. What is there is not fetched again,
    and a pull that was stopped goes on, within a file too, when the same command is run again.
    """
    name = parse_name(repository)
    if not plan:
        _refuse_unheeded(settings)
    with Reporter() as reporter:
        reporter.first(f"asking the hub about {name}")
        from colibri.checkpoint.hub.repository import list_files

        reporter(f"asking the hub about {name}", 0, 1)
        listing = list_files(name)
        files = listing.chosen(include or ())
        reporter(f"asking the hub about {name}", 1, 1)
        if plan:
            _plan(reporter, listing, files, settings, as_object)
            return
        report = _fetch(reporter, listing, files, directory, force)
    if as_object:
        print(json.dumps(as_json(report, listing)))
    else:
        print(summary(report, listing), file=sys.stderr)
        print(report.directory)


def _fetch(
    reporter: Reporter,
    listing: Listing,
    files: Sequence[HubFile],
    directory: Path | None,
    force: bool,
) -> PullReport:
    from colibri.checkpoint.hub.place import Cached, Folder
    from colibri.checkpoint.hub.pull import pull as fetch_all

    place = Cached(listing) if directory is None else Folder(listing, directory)

    def follow(progress: PullProgress) -> None:
        told = how(progress)
        reporter(f"fetching {listing.name}", progress.done_bytes, progress.total_bytes, told)

    return fetch_all(listing, files, place, again=force, progress=follow)


def how(progress: PullProgress) -> str:
    """Rate and time left, or that nothing comes."""
    done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
    if progress.silent_s >= _SILENT_S:
        return f"{done} of {total}, nothing came for {progress.silent_s:.0f} s"
    left = "" if progress.left_s is None else f", {format_seconds(progress.left_s)} left"
    return f"{done} of {total}, {format_bytes(progress.bytes_per_s)}/s{left}"


def _plan(
    reporter: Reporter,
    listing: Listing,
    files: Sequence[HubFile],
    settings: Settings,
    as_object: bool,
) -> None:
    """What `coli plan` would say of the files if they were here."""
    from colibri.checkpoint.hub.sketch import sketch
    from colibri.cli.plan import show_plan
    from colibri.lab.forecast.outlook import Outlook, look_out
    from colibri.lab.forecast.probes import ProbeError, why_no_probes
    from colibri.llm.loading import prepare

    with TemporaryDirectory(prefix="coli-plan-") as folder:
        stage = f"reading headers of {listing.name}"
        fetched = sketch(listing, files, Path(folder), lambda *counts: reporter(stage, *counts))
        prepared = prepare(replace(settings, model=folder))
        made = prepared.plan
        found: Outlook | str | None = why_no_probes(settings)
        if found is None:
            try:
                found = look_out(prepared.description, made, settings, reporter, is_here=False)
            except ProbeError as error:
                found = str(error)
    reporter.close()
    show_plan(made, str(listing.name), as_object, found)
    if not as_object:
        total = sum(file.nbytes for file in files)
        print(
            f"{len(files)} files, {format_bytes(total)} to fetch with `coli pull {listing.name}`; "
            f"this took {format_bytes(fetched)}."
        )


def _refuse_unheeded(settings: Settings) -> None:
    """Refuse flags that would change nothing."""
    defaults, variables = Settings(), Settings.names_in_environment()
    given = [n for n in _PLANNED if getattr(settings, n) != getattr(defaults, n)]
    if unheeded := [flag(name) for name in given if name not in variables]:
        raise SettingsError(
            f"{', '.join(unheeded)}: a pull does not need to know; add --plan to see what the "
            "model would do here, or give it to `coli run`"
        )


def summary(report: PullReport, listing: Listing) -> str:
    """One line: files and bytes, and how long it took."""
    rate = report.fetched_bytes / max(report.elapsed_s, 1e-9)
    came = (
        f"{format_bytes(report.fetched_bytes)} fetched in {format_seconds(report.elapsed_s)} "
        f"({format_bytes(rate)}/s), every digest agrees"
        if report.fetched_bytes
        else "all there already"
    )
    files = f"{report.num_files} files, {format_bytes(report.total_bytes)}"
    return f"{listing.name}: {files}, {came}"


def as_json(report: PullReport, listing: Listing) -> dict[str, Any]:
    """What `coli pull --json` prints."""
    return {
        "model": str(listing.name),
        "commit": listing.commit,
        "directory": str(report.directory),
        "files": report.num_files,
        "bytes": report.total_bytes,
        "fetched_bytes": report.fetched_bytes,
        "elapsed_s": report.elapsed_s,
    }
