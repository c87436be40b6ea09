"""`coli plan`: where every byte would go, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from colibri.cli.options import JSON, KERNELS, MEMORY, MODEL_ARGUMENT, with_some
from colibri.cli.progress import Reporter
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.llm.loading import Prepared
    from colibri.models.plan import Plan


@with_some("model", "family", *MEMORY, *KERNELS)
def plan(path: MODEL_ARGUMENT = None, *, as_object: JSON = False, settings: Settings) -> None:
    """Show how the memory budget would be divided."""
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.llm.loading import prepare

        prepared = prepare(settings)
    show_plan(prepared, str(prepared.directory), as_object)


def show_plan(prepared: Prepared, model: str, as_object: bool) -> None:
    """Print what was planned for `model`."""
    if as_object:
        print(json.dumps({"model": model, **prepared.plan.as_dict()}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table(prepared.plan))
    console.print(advice(prepared.plan), markup=False, soft_wrap=True)
    if prepared.plan.table_bytes:
        console.print(on_disk(prepared.plan), markup=False, soft_wrap=True)


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
