"""A forecast for a prepared model: on this machine or another, and what would change it most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.errors import BudgetError, SettingsError
from colibri.lab.forecast.forecast import Forecast, forecast
from colibri.lab.forecast.hits import Hits, expected_hits
from colibri.lab.forecast.probes import MOST_AGE_S, Probes, probe
from colibri.lab.forecast.work import Work, work_of
from colibri.llm.heat_keeper import open_usage
from colibri.llm.loading import LoadProgress, make_kernels
from colibri.llm.location import uses_bundled
from colibri.memory.budget import process_rss
from colibri.models.description import Description
from colibri.models.plan import Plan, plan_model
from colibri.settings import Settings
from colibri.units import format_bytes, parse_bytes

PROMPT_TOKENS = 512
_INT4_BYTES = 0.53125  # of a weight in int4-g64
_WORTH = 1.05  # times as fast, from which a change is told
_MOST_TOLD = 3


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A machine that is not this one; None leaves a size as it is here."""

    ram: int | None = None
    disk: float | None = None
    memory: float | None = None
    cores: int | None = None

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """`ram=64GiB,disk=7GB/s,memory=80GB/s,cores=16`, any of them.

        Raises:
            SettingsError: an unknown name, or a value that is no size.
        """
        found: dict[str, Any] = {}
        for pair in text.split(","):
            name, _, value = (each.strip() for each in pair.partition("="))
            try:
                if name == "cores":
                    found[name] = int(value)
                elif name in ("ram", "disk", "memory"):
                    found[name] = parse_bytes(value.removesuffix("/s"))
                else:
                    raise SettingsError(
                        f"what_if: {name!r} is unknown: known are ram, disk, memory and cores"
                    )
            except ValueError:
                raise SettingsError(
                    f"what_if: {pair.strip()!r} is no size: write it as "
                    "ram=64GiB,disk=7GB/s,memory=80GB/s,cores=16"
                ) from None
        if any(value <= 0 for value in found.values()):
            raise SettingsError(f"what_if is {text!r}: sizes must be above 0")
        return cls(**found)

    def probes(self, here: Probes) -> Probes:
        """What that machine would do."""
        return here.scaled(cores=self.cores, memory=self.memory, disk=self.disk)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that would make it faster, and by how much."""

    what: str
    times_as_fast: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A forecast with its plan and reasons.

    Attributes:
        plan: where every byte goes; of another machine, if one was asked for.
        work: what a token needs.
        probes: what the machine does.
        hits: the hit rate and its source.
        expected: speeds.
        changes: what would help, the best first.
    """

    plan: Plan
    work: Work
    probes: Probes
    hits: Hits
    expected: Forecast
    changes: tuple[Change, ...]

    def as_dict(self) -> dict[str, Any]:
        """As `coli plan --json` shows it, beside the plan."""
        plan = self.plan
        return {
            "placement": {
                "dense_bytes": plan.dense_bytes - self.work.shared_bytes,
                "shared_bytes": self.work.shared_bytes,
                "kv_bytes": plan.kv_bytes + plan.recurrent_bytes,
                "workspace_bytes": plan.workspace_bytes,
                "staging_bytes": plan.staging_bytes,
                "slots_bytes": plan.slots_bytes,
                "process_bytes": plan.process_bytes,
            },
            "ram_budget_bytes": plan.budget_bytes,
            **self.expected.as_dict(),
            "hit_rate_source": self.hits.source,
            "probes": {
                "disk_bytes_per_s": self.probes.disk_bytes_per_s,
                "is_drive_assumed": self.probes.is_drive_assumed,
                "dram_bytes_per_s": self.probes.dram_bytes_per_s,
                "threads": self.probes.threads,
                "at": self.probes.at,
                "others_share": self.probes.others_share,
            },
            "changes": [
                {"what": change.what, "times_as_fast": change.times_as_fast}
                for change in self.changes
            ],
        }


def look_out(
    description: Description,
    plan: Plan,
    settings: Settings,
    progress: LoadProgress,
    *,
    what_if: WhatIf = WhatIf(),
    hit_rate: float | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    most_age_s: float = MOST_AGE_S,
    is_here: bool = True,
) -> Outlook:
    """Probe this machine where that was not done lately, and forecast.

    Args:
        description: the model.
        plan: made for this machine.
        settings: by which it was made.
        progress: told while probing.
        what_if: another machine.
        hit_rate: known from elsewhere.
        prompt_tokens: of a prompt; at most the context.
        most_age_s: of probes that may be used again.
        is_here: whether its files are whole; before a download a usual drive is assumed.

    Raises:
        SettingsError, NativeLibraryError: there are no native kernels here, which are what speeds
            are told of.
        BudgetError: the model does not fit the other machine.
    """
    heat = _heat(description, settings) if is_here else None
    view = _View(description, settings, heat, hit_rate, prompt_tokens)
    if what_if.ram is not None:
        plan = view.planned(ram=what_if.ram)
    work = work_of(description, plan)
    index = description.experts if is_here else None
    here = probe(index, work.formats, settings, progress, most_age_s)
    probes = what_if.probes(here)
    hits, expected = view.expected(plan, work, probes)
    changes = sorted(
        (
            Change(what, other.decode.value / expected.decode.value)
            for what, other in view.others(plan, work, probes)
        ),
        key=lambda change: -change.times_as_fast,
    )
    told = [change for change in changes if change.times_as_fast >= _WORTH]
    return Outlook(
        plan=plan,
        work=work,
        probes=probes,
        hits=hits,
        expected=expected,
        changes=tuple(told[:_MOST_TOLD]),
    )


def _heat(description: Description, settings: Settings) -> NDArray[np.float64] | None:
    if not settings.heat or uses_bundled(settings) or not description.experts.layers:
        return None
    return open_usage(description).counts


@dataclass(frozen=True, slots=True)
class _View:
    """What does not change between this set-up and others."""

    description: Description
    settings: Settings
    heat: NDArray[np.float64] | None
    given: float | None
    prompt_tokens: int

    def planned(self, **changes: Any) -> Plan:
        """The budget divided anew, with some of what was asked changed."""
        memory = replace(self.settings.memory, **changes)
        return plan_model(self.description, memory, make_kernels(self.settings), process_rss())

    def expected(self, plan: Plan, work: Work, probes: Probes) -> tuple[Hits, Forecast]:
        """Hits and speeds under a plan."""
        resident = min(1.0, plan.num_slots / plan.num_experts) if plan.num_experts else 1.0
        hits = expected_hits(resident, self.heat, self.given)
        tokens = min(self.prompt_tokens, plan.context_length)
        return hits, forecast(work, probes, hits.rate, resident, tokens)

    def others(self, plan: Plan, work: Work, probes: Probes) -> Iterator[tuple[str, Forecast]]:
        """The same with one thing changed."""
        if plan.num_slots < plan.num_experts:
            yield from self._more_memory(plan, work, probes)
            faster = replace(probes, disk_bytes_per_s=2 * probes.disk_bytes_per_s)
            yield "a second drive (--mirror)", self.expected(plan, work, faster)[1]
        yield from self._int4(plan, work, probes)
        yield from self._shorter(plan, work, probes)
        more = probes.scaled(cores=2 * probes.threads, memory=None, disk=None)
        yield "twice the cores", self.expected(plan, work, more)[1]

    def _more_memory(
        self, plan: Plan, work: Work, probes: Probes
    ) -> Iterator[tuple[str, Forecast]]:
        try:
            larger = self.planned(ram=2 * plan.budget_bytes, expert_slots=None)
        except BudgetError:
            return
        if larger.num_slots > plan.num_slots:
            what = f"{format_bytes(2 * plan.budget_bytes)} of memory"
            yield what, self.expected(larger, work, probes)[1]

    def _int4(self, plan: Plan, work: Work, probes: Probes) -> Iterator[tuple[str, Forecast]]:
        """Experts in int4: fewer bytes each, and more of them in memory."""
        nbytes = sum(layer.record_bytes * layer.num_experts for layer in work.sparse)
        weights = sum(layer.weights * layer.num_experts for layer in work.sparse)
        if not weights or nbytes / weights < 1.1 * _INT4_BYTES:
            return
        ratio = nbytes / (weights * _INT4_BYTES)
        small = tuple(
            replace(layer, record_bytes=round(layer.weights * _INT4_BYTES), format="int4-g64")
            for layer in work.sparse
        )
        slots = min(plan.num_experts, int(plan.num_slots * ratio))
        other = self.expected(replace(plan, num_slots=slots), replace(work, sparse=small), probes)
        yield "experts in int4-g64 (coli convert, or --experts int4-g64)", other[1]

    def _shorter(self, plan: Plan, work: Work, probes: Probes) -> Iterator[tuple[str, Forecast]]:
        if plan.num_slots >= plan.num_experts or plan.context_length < 2048:
            return
        try:
            short = self.planned(context_length=plan.context_length // 4)
        except (BudgetError, SettingsError):
            return
        what = f"a context of {short.context_length:,} tokens (--context-length)"
        yield what, self.expected(short, work, probes)[1]
