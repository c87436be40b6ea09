"""The command line: `coli run | chat | serve | info | plan | pull | convert | verify | …`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import colibri
from colibri.cli.commands import LazyGroup, new_app

app = new_app(name="coli", cls=LazyGroup, no_args_is_help=True)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"coli {colibri.__version__}")
        raise typer.Exit


VERSION = Annotated[
    bool,
    typer.Option(
        "--version", callback=show_version, is_eager=True, metavar="", help="Show the version."
    ),
]


@app.callback()
def root(version: VERSION = False) -> None:
    """Run Mixture-of-Experts language models that are larger than memory."""


def main() -> int:
    """Run the command line; return the exit code."""
    if sys.stdout is None:  # closed by whoever started the command: nobody wants to read
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (to the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no failure
    try:
        app(prog_name="coli")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
