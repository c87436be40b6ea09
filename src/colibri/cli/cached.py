"""`coli list` and `coli rm`: what the shared cache holds, and taking it away."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.checkpoint.hub.names import parse_name
from colibri.cli.options import JSON, with_environment
from colibri.errors import SettingsError
from colibri.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibri.checkpoint.hub.shelf import CachedModel

REPOSITORY = Annotated[
    str,
    typer.Argument(metavar="REPO[@REVISION]", help="OWNER/NAME, every commit unless one is named."),
]
YES = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")]


@with_environment
def list_models(*, as_object: JSON = False) -> None:
    """Show the models in the shared cache."""
    from colibri.checkpoint.hub.shelf import cached_models

    models = [model for model in cached_models() if model.has_weights or model.num_unfinished]
    if as_object:
        print(json.dumps([as_json(model) for model in models]))
        return
    if not models:
        print("the cache holds no models: `coli pull OWNER/NAME` fetches one", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table("model", "size", "used", "", box=None, pad_edge=False)
    shown.columns[1].justify = "right"
    for model in models:
        ago = f"{format_seconds(max(time.time() - model.used_s, 0))} ago"
        shown.add_row(str(model.name), format_bytes(model.nbytes), ago, _unfinished(model))
    Console(highlight=False).print(shown)


@with_environment
def remove_model(repository: REPOSITORY, *, yes: YES = False, as_object: JSON = False) -> None:
    """Take a model out of the shared cache.

    Files that another commit uses too stay. It asks first.
    """
    name = parse_name(repository)
    from colibri.checkpoint.hub.shelf import matching, remove

    models = matching(name)
    if not yes:
        _ask(models)
    freed = remove(models)
    if as_object:
        removed = [str(model.directory) for model in models]
        print(json.dumps({"removed": removed, "freed_bytes": freed}))
    else:
        print(f"{name}: removed, {format_bytes(freed)} are free", file=sys.stderr)


def _ask(models: Sequence[CachedModel]) -> None:
    """Whether they may go; raises SettingsError where nobody can answer."""
    if not sys.stdin.isatty():
        raise SettingsError("nobody is there to be asked: give --yes to remove without asking")
    for model in models:
        print(f"{model.name}: {format_bytes(model.nbytes)}, {model.directory}", file=sys.stderr)
    typer.confirm("remove?", abort=True, err=True)


def _unfinished(model: CachedModel) -> str:
    count = model.num_unfinished
    if not count:
        return ""
    return f"{count} unfinished file{'' if count == 1 else 's'}: `coli pull {model.name}` goes on"


def as_json(model: CachedModel) -> dict[str, Any]:
    """One model of `coli list --json`."""
    return {
        "model": str(model.name),
        "repo": model.repo,
        "commit": model.commit,
        "revisions": list(model.revisions),
        "directory": str(model.directory),
        "bytes": model.nbytes,
        "files": model.num_files,
        "unfinished_files": model.num_unfinished,
        "used_s": model.used_s,
    }
