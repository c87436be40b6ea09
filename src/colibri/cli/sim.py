"""`coli sim`: what each policy would hit at each capacity, from traces of routing."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from colibri.cli.options import JSON, with_environment
from colibri.errors import RequestError
from colibri.lab.sim import POLICIES, Simulation, simulate
from colibri.lab.trace import read_trace
from colibri.units import format_bytes


class Steps(StrEnum):
    """What is needed at once."""

    TOKEN = "token"
    PASS = "pass"


TRACES = Annotated[
    list[Path], typer.Argument(metavar="TRACE…", help="Files of --route-trace, of one model.")
]
CAPACITY = Annotated[
    list[str] | None,
    typer.Option(
        "--capacity",
        metavar="N, P%",
        help="Experts that fit; may be given several times. Default: 12.5% to 75%.",
    ),
]
STEPS = Annotated[
    Steps,
    typer.Option(
        "--steps",
        metavar="token, pass",
        help="What is needed at once: a token's experts, as when decoding, or those of a whole "
        "pass, as it was computed.",
    ),
]

_WIDTH = 50
_MARKS = {"random": "r", "lru": "L", "lfu": "F", "mixed": "M", "belady": "B"}


@with_environment
def sim(
    traces: TRACES,
    capacity: CAPACITY = None,
    steps: STEPS = Steps.TOKEN,
    *,
    as_object: JSON = False,
) -> None:
    """Replay traces against eviction policies: learn on first halves, score on second halves."""
    read = [read_trace(path) for path in traces]
    sizes = None if capacity is None else [parse_capacity(c, read[0].num_keys) for c in capacity]
    found = simulate(read, sizes, steps=steps.value)
    if as_object:
        print(json.dumps({"traces": [str(path) for path in traces], **found.as_dict()}))
        return
    console = Console(highlight=False)
    console.print(f"{found.num_tokens:,} tokens, {found.num_experts:,} experts; second halves:")
    console.print(table(found))
    console.print(plot(found), markup=False, soft_wrap=True)


def parse_capacity(text: str, num_experts: int) -> int:
    """`25%` or `48` as a number of experts.

    Raises:
        RequestError: it is neither, or more than there are.
    """
    try:
        share = text.endswith("%")
        number = int(float(text[:-1]) / 100 * num_experts) if share else int(text)
    except (ValueError, OverflowError):
        raise RequestError(
            f"--capacity is {text}: give a number of experts, or a share such as 25%"
        ) from None
    if number > num_experts:
        raise RequestError(
            f"--capacity is {text}, but the model has {num_experts:,} experts: give at most "
            f"{num_experts}, or 100%"
        )
    return number


def table(found: Simulation) -> Table:
    """Hit rate of each policy at each capacity; for mixed, the share of the gap it closes too."""
    shown = Table("policy", box=None, pad_edge=False)
    columns = [s for s in found.scores if s.policy == "lru"]
    for column in columns:
        shown.add_column(f"{column.capacity} ({column.share:.1%})", justify="right")
    for policy in dict.fromkeys(s.policy for s in found.scores):
        own = [s for s in found.scores if s.policy == policy]
        shown.add_row(policy, *(f"{s.hit_rate:.1%}" for s in own))
        if own[0].bytes_read:
            shown.add_row("  read", *(format_bytes(s.bytes_read) for s in own), style="dim")
        if policy == "mixed":
            gaps = ("–" if s.gap_closed is None else f"{s.gap_closed:.0%}" for s in own)
            shown.add_row("  of the gap lru–belady", *gaps, style="dim")
    return shown


def plot(found: Simulation) -> str:
    """One line a capacity, from 0 to 100 % hits, a letter for each policy; later ones on top."""
    key = ", ".join(f"{mark} {name}" for name, mark in _MARKS.items())
    lines = [f"hits, 0 to 100 % ({key})"]
    for capacity in dict.fromkeys(s.capacity for s in found.scores):
        marks = ["·"] * (_WIDTH + 1)
        for name in POLICIES:
            for score in found.scores:
                if (score.policy, score.capacity) == (name, capacity):
                    marks[round(score.hit_rate * _WIDTH)] = _MARKS[name]
        lines.append(f"{capacity:>7} |{''.join(marks)}|")
    return "\n".join(lines)
