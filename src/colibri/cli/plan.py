"""`coli plan`: where every byte would go, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.options import JSON, KERNELS, MEMORY, MODEL_ARGUMENT, with_some
from colibri.cli.progress import Reporter
from colibri.errors import SettingsError
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.lab.forecast.outlook import Outlook, WhatIf
    from colibri.models.plan import Plan


SERVE = Annotated[
    bool,
    typer.Option(
        "--serve", metavar="", help="As `coli serve` would divide it, its two processes together."
    ),
]


WHAT_IF = Annotated[
    str | None,
    typer.Option(
        "--what-if",
        metavar="NAME=SIZE,…",
        help="For a machine that is not this one: ram=64GiB, disk=7GB/s, memory=80GB/s, cores=16.",
    ),
]
HIT_RATE = Annotated[
    float | None,
    typer.Option(
        "--hit-rate",
        min=0.0,
        max=1.0,
        metavar="X",
        help="Share of experts found in memory; by default from heat, else a typical one.",
    ),
]
PROMPT = Annotated[
    int, typer.Option("--prompt-tokens", min=1, metavar="N", help="Of the prompt that is forecast.")
]
FORECAST = Annotated[
    bool,
    typer.Option(
        "--forecast/--no-forecast",
        metavar="",
        help="Probe this machine for some seconds, if that was not done today, and tell speeds.",
    ),
]


@with_some("model", "family", *MEMORY, "mtp", "max_sessions", *KERNELS, "cache_dir")
def plan(
    path: MODEL_ARGUMENT = None,
    *,
    serve: SERVE = False,
    what_if: WHAT_IF = None,
    hit_rate: HIT_RATE = None,
    prompt_tokens: PROMPT = 512,
    forecast: FORECAST = True,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Show how the memory budget would be divided, and how fast that will be."""
    if settings.max_sessions is not None and not serve:
        raise SettingsError(
            "max_sessions is for `coli serve`, other commands compute one reply at a time: add "
            "--serve, or leave it out"
        )
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.llm.location import find_model

        other = _parsed(what_if, forecast)
        made = plan_of_serving(settings) if serve else plan_of_running(settings, reporter)
        found = None
        if forecast:
            found = outlook_of(made, settings, reporter, other, hit_rate, prompt_tokens)
    show_plan(made, str(find_model(settings)), as_object, found)


def _parsed(what_if: str | None, forecast: bool) -> WhatIf | None:
    if what_if is None:
        return None
    if not forecast:
        raise SettingsError("--what-if is a forecast: leave --no-forecast out")
    from colibri.lab.forecast.outlook import WhatIf

    return WhatIf.parse(what_if)


def outlook_of(
    made: Plan,
    settings: Settings,
    reporter: Reporter,
    what_if: WhatIf | None = None,
    hit_rate: float | None = None,
    prompt_tokens: int = 512,
) -> Outlook | str:
    """A forecast under a plan, or why there is none."""
    from colibri.checkpoint.index import Checkpoint
    from colibri.lab.forecast.outlook import WhatIf, look_out
    from colibri.lab.forecast.probes import ProbeError, why_no_probes
    from colibri.llm.location import find_model
    from colibri.models.description import Description

    if (why := why_no_probes(settings)) is not None:
        return why
    checkpoint = Checkpoint.open(find_model(settings), settings.family)
    description = Description.of(checkpoint, settings.coding, mtp=settings.mtp)
    try:
        return look_out(
            description,
            made,
            settings,
            reporter,
            what_if=what_if or WhatIf(),
            hit_rate=hit_rate,
            prompt_tokens=prompt_tokens,
        )
    except ProbeError as error:
        return str(error)


def plan_of_running(settings: Settings, reporter: Reporter) -> Plan:
    """What `coli run` and `coli chat` would do: by their own code, and as large as they are."""
    from colibri.cli import chat, run  # noqa: F401  (what they import is part of the process)
    from colibri.llm import LLM  # noqa: F401
    from colibri.llm.loading import prepare_told

    return prepare_told(settings, reporter).plan


def plan_of_serving(settings: Settings) -> Plan:
    """What `coli serve` would do: this process is as large as the server, another the engine."""
    from colibri.cli.serve import with_sessions
    from colibri.llm.service import engine_plan
    from colibri.server import running  # noqa: F401
    from colibri.server.opening import serving_of

    settings = with_sessions(settings)
    serving = serving_of(settings)
    made = engine_plan(settings)
    del serving
    return made


def show_plan(plan: Plan, model: str, as_object: bool, found: Outlook | str | None = None) -> None:
    """Print what was planned for `model`, and what speed is to be expected, or why none is told."""
    if found is not None and not isinstance(found, str):
        plan = found.plan
    if as_object:
        speeds = found.as_dict() if found is not None and not isinstance(found, str) else {}
        print(json.dumps({"model": model, **plan.as_dict(), **speeds}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table(plan))
    console.print(advice(plan), markup=False, soft_wrap=True)
    if plan.table_bytes:
        console.print(on_disk(plan), markup=False, soft_wrap=True)
    if isinstance(found, str):
        console.print(f"No speed is forecast: {found}.", markup=False, soft_wrap=True)
    elif found is not None:
        from colibri.cli.outlook import lines

        for text in lines(found):
            console.print(text, markup=False, soft_wrap=True)


def table(plan: Plan) -> Table:
    """One row a share, the budget below them."""
    from rich.table import Table

    shown = Table("share", "size", show_footer=True, box=None, pad_edge=False)
    shown.columns[0].footer = "budget"
    shown.columns[1].footer = format_bytes(plan.budget_bytes)
    shown.columns[1].justify = "right"
    for name, nbytes in plan.rows():
        shown.add_row(name, format_bytes(nbytes))
    return shown


def on_disk(plan: Plan) -> str:
    """What no budget holds."""
    return (
        f"Tables of {format_bytes(plan.table_bytes)} stay on disk: a token reads "
        f"{format_bytes(plan.table_bytes_per_token)} of them, row by row."
    )


def advice(plan: Plan) -> str:
    """What a token reads, and what more memory would bring."""
    missing = plan.num_experts - plan.num_slots
    if missing <= 0:
        return "All experts stay in memory: each is read once."
    cold = format_bytes(plan.bytes_per_token_cold)
    more = missing * plan.slots_bytes // plan.num_slots - plan.spare_bytes
    need = "More expert_slots would fit:" if more <= 0 else f"With {format_bytes(more)} more,"
    return (
        f"A token reads up to {cold} while nothing is resident. "
        f"{need} all {plan.num_experts:,} experts could stay in memory."
    )
