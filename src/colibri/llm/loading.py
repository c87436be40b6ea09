"""From settings to a model in memory, in the order that keeps the budget honest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri import kernels as kernel_library
from colibri.checkpoint.index import Checkpoint
from colibri.errors import BudgetError, NativeLibraryError, SettingsError
from colibri.kernels.api import Activations, Kernels
from colibri.kernels.cpus import affinity_cpus
from colibri.llm.defaults import GenerationDefaults, token_ids
from colibri.llm.heat_keeper import HeatKeeper, open_usage, open_verdicts
from colibri.llm.location import find_model, uses_bundled
from colibri.llm.route_trace import RouteTrace
from colibri.memory.budget import machine_bytes, malloc_trim, process_rss
from colibri.models.config import BaseConfig
from colibri.models.description import Description
from colibri.models.loader import load_model
from colibri.models.model import Model
from colibri.models.plan import Plan, plan_model
from colibri.settings import Settings
from colibri.spans import Spans
from colibri.text import ChatTemplate, Tokenizer
from colibri.text.dialects import Dialect, find_dialect
from colibri.units import format_bytes

LoadProgress = Callable[[str, int, int], None]  # stage, done, total
_THREADS_A_CPU = 4  # more are a mistake, not a choice
_log = logging.getLogger("colibri")


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
        """Where the checkpoint lies: its directory, or its GGUF file."""
        return self.description.checkpoint.place

    @property
    def config(self) -> BaseConfig:
        """config.json as the family reads it."""
        return self.description.blueprint.config

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a turn: of config, generation config and tokenizer together."""
        return end_ids(self.description, self.defaults, self.tokenizer)

    @property
    def dialect(self) -> Dialect:
        """How replies spell reasoning and tool calls."""
        sources = () if self.template is None else self.template.sources.values()
        return find_dialect(sources, self.description.blueprint.family.dialect)

    @property
    def lossy(self) -> tuple[str, ...]:
        """Choices that cost accuracy, as `setting=value`; none is a default."""
        values = {"kv": self.plan.kv_format, "activations": str(self.kernels.activations)}
        chosen = {name: value for name, value in values.items() if value == "int8"}
        chosen |= self.description.rounded
        return tuple(f"{name}={value}" for name, value in chosen.items())

    def load(self, progress: LoadProgress | None = None) -> tuple[Model, HeatKeeper | None]:
        """Carry out the plan, and begin to read what earlier runs used most, or all that fits."""
        profile = self.settings.profile
        spans = None if profile is None else Spans(Path(profile))
        settings = self.settings
        keeps_heat = settings.heat and not settings.mtp and not uses_bundled(settings)
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
            spans=spans,
        )
        if self.settings.warm_start:
            shape = self.description.experts.file.shape[:2]
            model.store.warm(np.zeros(shape) if usage is None else usage.counts)
        return model, None if usage is None else HeatKeeper(usage, model.store, verdicts)

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
            [index for index, _ in self.description.blueprint.sparse_layers()],
            (limits.num_experts, limits.num_experts_per_tok),
            self.plan.record_bytes,
        )


def end_ids(
    description: Description, defaults: GenerationDefaults, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every id that ends a turn: of config, generation config and tokenizer together."""
    config, directory = description.blueprint.config, description.checkpoint.directory
    own = token_ids(config.eos_token_id, f"{directory}/config.json: eos_token_id")
    text = frozenset() if tokenizer is None else tokenizer.eos_ids
    return own | defaults.eos_ids | text


def prepare(settings: Settings, other_bytes: int = 0) -> Prepared:
    """Read everything but weights, then plan; `other_bytes` of the budget are in use elsewhere.

    The tokenizer comes first, and what its loading freed goes back to the system, so that the
    process is measured as it will stay.

    Raises:
        CheckpointError, TextError, SettingsError, BudgetError: as their layers raise them.
    """
    _check_ram(settings.ram)
    directory = find_model(settings)
    coding, checkpoint = settings.coding, Checkpoint.open(directory, settings.family)
    description = Description.of(checkpoint, coding, mtp=settings.mtp)
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory) if tokenizer is not None else None
    defaults = GenerationDefaults.load(directory)
    kernels = make_kernels(settings)
    malloc_trim()
    plan = plan_model(description, settings.memory, kernels, process_rss() + other_bytes)
    return Prepared(settings, description, tokenizer, template, defaults, kernels, plan)


def prepare_told(
    settings: Settings, progress: LoadProgress | None, other_bytes: int = 0
) -> Prepared:
    """`prepare`, and tell about it."""
    if progress is None:
        return prepare(settings, other_bytes)
    stage = f"opening {find_model(settings)}"
    progress(stage, 0, 1)
    prepared = prepare(settings, other_bytes)
    progress(stage, 1, 1)
    return prepared


@dataclass(frozen=True, slots=True)
class Opened:
    """A model in memory and what belongs to it."""

    prepared: Prepared
    model: Model
    heat: HeatKeeper | None = None
    route_trace: RouteTrace | None = None


def open_model(
    settings: Settings, progress: LoadProgress | None = None, other_bytes: int = 0
) -> Opened:
    """Prepare and load; large checkpoints take their time for both. See `prepare`."""
    prepared = prepare_told(settings, progress, other_bytes)
    _warn(prepared)
    route_trace = prepared.route_trace()
    model, heat = prepared.load(progress)
    return Opened(prepared, model, heat, route_trace)


def make_kernels(settings: Settings) -> Kernels:
    """The kernels that the settings ask for.

    Raises:
        NativeLibraryError: native ones were asked for and are not there.
        SettingsError: the kernels there do not code activations as asked, or there are far more
            threads than CPUs.
    """
    _check_threads(settings.threads)
    why = kernel_library.why_reference() if settings.kernels == "native" else None
    if why is not None:
        raise NativeLibraryError(
            f"native kernels were asked for, but this installation has none: {why}"
        )
    wanted = settings.activations
    coding = wanted or Activations.INT16
    made = kernel_library.make_kernels(settings.kernels, settings.threads, coding, settings.isa)
    if wanted is not None and made.activations != wanted:
        raise SettingsError(
            f"activations is {wanted}, but the {made.name} kernels compute with "
            f"{made.activations}: leave it out, or use native kernels"
        )
    return made


def _check_ram(ram: int | None) -> None:
    most = None if ram is None else machine_bytes()
    if ram is not None and most is not None and ram > most:
        raise BudgetError(
            f"ram is {format_bytes(ram)}, but this machine has {format_bytes(most)}: ask for less, "
            "or leave it out to use what is free"
        )


def _check_threads(threads: int | None) -> None:
    cpus = affinity_cpus()
    if threads is not None and threads > _THREADS_A_CPU * cpus:
        raise SettingsError(
            f"threads is {threads}, but this process may use {cpus} CPU{'' if cpus == 1 else 's'}: "
            f"ask for at most {_THREADS_A_CPU * cpus}, or leave it out to use every CPU once"
        )


def _warn(prepared: Prepared) -> None:
    """Say what costs accuracy or makes a model slow that is about to be loaded."""
    for choice in prepared.lossy:
        _log.warning("%s is lossy: replies may differ from those of the defaults", choice)
    if prepared.description.left_aside:
        aside = prepared.description.left_aside_text
        _log.warning("tensors that this model does without are not read: %s", aside)
    settings, kernels, cpus = prepared.settings, prepared.kernels, affinity_cpus()
    why = kernel_library.why_reference()
    if settings.family is not None:
        _log.warning(
            "config.json is read as that of %s because `family` says so; nothing else says that "
            "this model computes the same",
            prepared.description.blueprint.family.model_type,
        )
    if settings.kernels == "auto" and why is not None:
        _log.warning("running on the slow NumPy reference: %s", why)
    if settings.cache_dir is not None and not _is_writable(Path(settings.cache_dir)):
        _log.warning("%s cannot be written: measurements are not kept", settings.cache_dir)
    threads = settings.threads or 0
    if threads > cpus and kernels.name == "native":
        _log.warning("%d threads share %d CPUs: more threads than CPUs are slower", threads, cpus)


def _is_writable(directory: Path) -> bool:
    """Whether a directory can be written, or made where it is not there."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return place.is_dir() and os.access(place, os.W_OK)
