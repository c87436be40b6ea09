"""How a bench's envelope is printed, and with which code the command ends."""

from __future__ import annotations

import json
import sys

import typer
from rich.console import Console
from rich.table import Table

from colibri.lab.envelope import NOT_A_MEASUREMENT, Envelope

_LEAST_WIDTH = 120  # of the table: where a terminal is narrower, it breaks the lines
_RATES = {
    "dram_read_bytes_per_s": "memory read by the same threads",
    "disk_read_bytes_per_s": "records read by bare threads",
    "mmap_read_bytes_per_s": "mapped records read by the same threads",
}


def report(envelope: Envelope, as_object: bool, table: Table, caption: str = "") -> None:
    """Print it; leave with 3 where it is not a measurement.

    Raises:
        typer.Exit: with that code.
    """
    if as_object:
        print(json.dumps(envelope.as_dict()), flush=True)
    else:
        console = Console(highlight=False, width=max(Console().width, _LEAST_WIDTH))
        console.print(table)
        if caption:
            console.print(caption, style="dim")
        for name, words in _RATES.items():
            if name in envelope.ceilings:
                console.print(f"limit: {envelope.ceilings[name] / 1e9:.1f} GB/s, {words}")
    if envelope.reasons:
        print(f"coli: not a measurement: {'; '.join(envelope.reasons)}", file=sys.stderr)
        raise typer.Exit(NOT_A_MEASUREMENT)
