"""From settings to a model in memory, in the order that keeps the budget honest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri import kernels as kernel_library
from colibri.checkpoint.index import Checkpoint
from colibri.errors import SettingsError
from colibri.kernels.api import Activations, Kernels
from colibri.llm.defaults import GenerationDefaults, token_ids
from colibri.llm.heat_keeper import HeatKeeper, open_usage, open_verdicts
from colibri.llm.route_trace import RouteTrace
from colibri.memory.budget import malloc_trim, process_rss
from colibri.models.config import BaseConfig
from colibri.models.description import Description
from colibri.models.loader import load_model
from colibri.models.model import Model
from colibri.models.plan import Plan, plan_model
from colibri.settings import Settings
from colibri.text import ChatTemplate, Tokenizer

BUNDLED = Path(__file__).parents[1] / "bundled"
LoadProgress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint understood and planned, before any weights are loaded."""

    settings: Settings
    description: Description
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    kernels: Kernels
    plan: Plan

    @property
    def directory(self) -> Path:
        """Where the checkpoint lies."""
        return self.description.checkpoint.directory

    @property
    def config(self) -> BaseConfig:
        """config.json as the family reads it."""
        return self.description.blueprint.config

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a turn: of config, generation config and tokenizer together."""
        own = token_ids(self.config.eos_token_id, f"{self.directory}/config.json: eos_token_id")
        text = frozenset() if self.tokenizer is None else self.tokenizer.eos_ids
        return own | self.defaults.eos_ids | text

    def load(self, progress: LoadProgress | None = None) -> tuple[Model, HeatKeeper | None]:
        """Carry out the plan, and begin to read what earlier runs used most."""
        keeps_heat = self.settings.heat and not uses_bundled(self.settings)
        usage = open_usage(self.description) if keeps_heat else None
        verdicts = open_verdicts(self.description, self.plan.num_slots) if keeps_heat else None
        model = load_model(
            self.description,
            self.plan,
            self.kernels,
            progress,
            eviction=self.settings.eviction,
            heat=None if usage is None else usage.counts,
            reader=self.settings.reader,
            prefetch=self.settings.prefetch,
            governor=None if verdicts is None else verdicts.governor,
        )
        if usage is None:
            return model, None
        if self.settings.warm_start:
            model.store.warm(usage.counts)
        return model, HeatKeeper(usage, model.store, verdicts)

    def route_trace(self) -> RouteTrace | None:
        """The file that the settings want routing written to.

        Raises:
            SettingsError: it cannot be written.
        """
        if self.settings.route_trace is None:
            return None
        limits = self.description.blueprint.limits(1)
        return RouteTrace(
            Path(self.settings.route_trace),
            str(self.directory),
            [layout.layer for layout in self.description.experts.layers],
            (limits.num_experts, limits.num_experts_per_tok),
            self.plan.record_bytes,
        )


def uses_bundled(settings: Settings) -> bool:
    """Whether no model is named and one came with the package."""
    return settings.model is None and (BUNDLED / "config.json").is_file()


def find_model(settings: Settings) -> Path:
    """The checkpoint that the settings name, else the one that comes with the package.

    Raises:
        SettingsError: none is named and none came along.
    """
    if settings.model is not None:
        return Path(settings.model)
    if uses_bundled(settings):
        return BUNDLED
    raise SettingsError(
        "no model is named, and none came with this installation: name a checkpoint's directory "
        "(--model, or COLIBRI_MODEL), or make one with `python tools/make_checkpoint.py my-model`"
    )


def prepare(settings: Settings) -> Prepared:
    """Read everything but weights, then plan.

    The tokenizer comes first, and what its loading freed goes back to the system, so that the
    process is measured as it will stay.

    Raises:
        CheckpointError, TextError, SettingsError, BudgetError: as their layers raise them.
    """
    directory = find_model(settings)
    description = Description.of(Checkpoint.open(directory))
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory) if tokenizer is not None else None
    defaults = GenerationDefaults.load(directory)
    kernels = make_kernels(settings)
    malloc_trim()
    plan = plan_model(description, settings.memory, kernels, process_rss())
    return Prepared(settings, description, tokenizer, template, defaults, kernels, plan)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model in memory and what belongs to it."""

    prepared: Prepared
    model: Model
    heat: HeatKeeper | None = None
    route_trace: RouteTrace | None = None


def open_model(settings: Settings, progress: LoadProgress | None = None) -> Opened:
    """Prepare and load; large checkpoints take their time for both."""
    if progress is None:
        prepared = prepare(settings)
    else:
        stage = f"opening {find_model(settings)}"
        progress(stage, 0, 1)
        prepared = prepare(settings)
        progress(stage, 1, 1)
    route_trace = prepared.route_trace()
    model, heat = prepared.load(progress)
    return Opened(prepared, model, heat, route_trace)


def make_kernels(settings: Settings) -> Kernels:
    """The kernels that the settings ask for.

    Raises:
        NativeLibraryError: native ones were asked for and are not there.
        SettingsError: the kernels there are do not code activations as asked.
    """
    wanted = settings.activations
    coding = wanted or Activations.INT16
    made = kernel_library.make_kernels(settings.kernels, settings.threads, coding, settings.isa)
    if wanted is not None and made.activations != wanted:
        raise SettingsError(
            f"activations is {wanted}, but the {made.name} kernels compute with "
            f"{made.activations}: leave it out, or use native kernels"
        )
    return made
