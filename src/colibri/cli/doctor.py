"""`coli doctor`: is this machine fit, is the model whole, and what would make it faster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.options import JSON, KERNELS, MEMORY, MODEL_ARGUMENT, with_some
from colibri.cli.progress import Reporter
from colibri.settings import Settings

if TYPE_CHECKING:
    from colibri.lab.doctor.finding import Finding

STRICT = Annotated[
    bool,
    typer.Option("--strict", metavar="", help="Exit with 1 for what is slow, too."),
]
_MARKS = {"fine": "✓", "note": "·", "slow": "!", "fault": "✗"}
_STYLES = {"fine": "green", "note": "dim", "slow": "yellow", "fault": "red"}


@with_some("model", "family", "host", "port", "cache_dir", *MEMORY, *KERNELS)
def doctor(
    path: MODEL_ARGUMENT = None,
    *,
    strict: STRICT = False,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Examine this machine and a model: what works, what is slow, and what mends it.

    Exits with 1 where something does not work.
    """
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.lab.doctor.examine import examine, worst

        findings = list(examine(settings, reporter))
    if as_object:
        print(json.dumps(told(findings)))
    else:
        show(findings)
    failing = ("slow", "fault") if strict else ("fault",)
    if worst(findings) in failing:
        raise typer.Exit(1)


def told(findings: Sequence[Finding]) -> dict[str, object]:
    """What `--json` prints; the form for reports of bugs asks for it."""
    from colibri.lab.doctor.examine import SCHEMA, worst
    from colibri.lab.envelope import commit_of_package
    from colibri.lab.machine import machine_facts

    return {
        "schema": SCHEMA,
        "commit": commit_of_package(),
        "machine": machine_facts(),
        "worst": worst(list(findings)),
        "findings": [finding.as_dict() for finding in findings],
    }


def show(findings: Sequence[Finding]) -> None:
    """One line a check; below it what follows and what mends it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = max(len(finding.check) for finding in findings) + 2
    for finding in findings:
        line = Text(f"{_MARKS[finding.grade]} ", _STYLES[finding.grade])
        line.append(finding.check.ljust(width), "bold")
        console.print(line.append(finding.found), soft_wrap=True)
        for lead, text in (("", finding.consequence), ("→ ", finding.mend)):
            if text:
                console.print(Text(" " * (width + 2) + lead + text, "dim"), soft_wrap=True)
    counts = [sum(f.grade == grade for f in findings) for grade in ("fault", "slow")]
    console.print(summary(*counts))


def summary(num_faults: int, num_slow: int) -> str:
    """What it comes to."""
    if num_faults:
        return f"{num_faults} of these must be mended before it works"
    return f"it works; {num_slow} of these cost speed" if num_slow else "all is well"
