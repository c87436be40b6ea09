"""The command line: `coli run | chat | info | plan`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import colibri
from colibri.cli.chat import chat
from colibri.cli.info import info
from colibri.cli.plan import plan
from colibri.cli.run import run

app = typer.Typer(
    name="coli",
    help="Run Mixture-of-Experts language models that are larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, info, plan):
    app.command()(command)


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no failure
    try:
        app(prog_name="coli")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
