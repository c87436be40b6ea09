"""The command line: `coli run | chat | info | plan | convert | verify | sim | bench`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import colibri
from colibri.cli.bench import app as bench
from colibri.cli.chat import chat
from colibri.cli.convert import convert
from colibri.cli.info import info
from colibri.cli.mirror import app as mirror_app
from colibri.cli.plan import plan
from colibri.cli.run import run
from colibri.cli.sim import sim
from colibri.cli.verify import verify

app = typer.Typer(
    name="coli",
    help="Run Mixture-of-Experts language models that are larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, info, plan, convert, verify, sim):
    app.command()(command)
app.add_typer(bench)
app.add_typer(mirror_app, name="mirror")


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"coli {colibri.__version__}")
        raise typer.Exit


VERSION = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
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
