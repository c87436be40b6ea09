"""The model: whether it is whole, usable, and fits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from colibri.checkpoint.container import Container
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.safetensors import read_tensor
from colibri.errors import BudgetError, ColibriError
from colibri.lab.doctor.finding import Finding, fault, fine, note, slow
from colibri.llm.loading import LoadProgress, prepare
from colibri.llm.location import uses_bundled
from colibri.models.description import Description
from colibri.models.plan import Plan
from colibri.settings import Settings
from colibri.text import ChatTemplate, Tokenizer
from colibri.units import format_bytes

_SAMPLED = 24  # records whose checksums are looked at


def census(settings: Settings, checkpoint: Checkpoint) -> tuple[Finding, Description | None]:
    """Whether every tensor is there, and understood."""
    try:
        found = Description.of(checkpoint, settings.coding, mtp=settings.mtp)
    except ColibriError as error:
        return broken(error), None
    family = found.blueprint.family.model_type
    files = len({tensor.spec.file for tensor in found.dense} | set(found.experts.files))
    return fine("model", f"{family}, every tensor in {files} files", family=family), found


def broken(error: ColibriError) -> Finding:
    """The model cannot be opened; the message says what mends it."""
    return fault("model", str(error), "the model does not open", "see the message")


def model_findings(
    description: Description, settings: Settings, progress: LoadProgress
) -> Iterator[Finding]:
    """All checks of this module but the census."""
    yield from check_text(description)
    yield from check_layout(description)
    container = description.checkpoint.container
    if container is not None:
        yield check_records(container, progress)
    if settings.heat and not uses_bundled(settings):
        yield check_permissions(description)
    yield check_plan(settings)


def check_text(description: Description) -> Iterator[Finding]:
    """Tokenizer and chat template."""
    directory = description.checkpoint.place
    try:
        tokenizer = Tokenizer.load(directory)
        template = None if tokenizer is None else ChatTemplate.load(directory)
    except ColibriError as error:
        yield fault("tokenizer", str(error), "text cannot be read", "fetch its files again")
        return
    if tokenizer is None:
        yield note(
            "tokenizer",
            "none",
            "the model opens for token ids only",
            "fetch tokenizer.json from where the model comes from",
        )
        return
    yield fine("tokenizer", f"{tokenizer.vocab_size:,} tokens")
    if template is None:
        yield note(
            "chat template",
            "none",
            "`coli run` continues text; `coli chat` and chat requests are refused",
        )
    if not tokenizer.eos_ids and not description.blueprint.config.eos_token_id:
        yield slow(
            "end of turn",
            "no id ends a reply",
            "replies go on to --max-tokens",
            "give --stop-ids, or add eos_token_id to generation_config.json",
        )


def check_layout(description: Description) -> Iterator[Finding]:
    """Whether an expert is one aligned read."""
    index = description.experts
    if not len(index.layers) or description.checkpoint.container is not None:
        return
    pieces = int((index.file >= 0).sum(axis=2).max())
    place = description.checkpoint.place
    keeps = any(part.format.is_coded for layer in index.layers for part in layer.parts)
    yield note(
        "layout",
        f"as published: {pieces} reads an expert",
        "it runs as it is; a container reads each expert at once"
        + ("" if keeps else ", and int4 reads a fourth of bf16"),
        f"coli convert {place} {place.stem if place.is_file() else place.name}"
        + ("-container --experts keep" if keeps else "-int4"),
    )


def check_records(container: Container, progress: LoadProgress) -> Finding:
    """The checksums of some experts, chosen at random; `coli verify` looks at all."""
    rng = np.random.default_rng()
    keys = [(layer, e) for layer, specs in container.records.items() for e in range(len(specs))]
    chosen = rng.choice(len(keys), min(_SAMPLED, len(keys)), replace=False).tolist()
    bad: list[str] = []
    for number, index in enumerate(chosen):
        progress("checking experts", number, len(chosen))
        layer, expert = keys[index]
        try:
            found = crc32c(read_tensor(container.records[layer][expert]))
        except ColibriError as error:
            bad.append(str(error))
            continue
        if found != int(container.read_checksums(layer)[expert]):
            bad.append(f"layer {layer}, expert {expert}: its checksum does not agree")
    progress("checking experts", len(chosen), len(chosen))
    if bad:
        return fault(
            "experts",
            "; ".join(bad[:3]),
            "requests that want a damaged expert fail",
            f"coli verify --deep {container.directory}",
            damaged=len(bad),
            sampled=len(chosen),
        )
    return fine(
        "experts",
        f"checksums of {len(chosen)} of {len(keys):,} agree",
        damaged=0,
        sampled=len(chosen),
    )


def check_permissions(description: Description) -> Finding:
    """Whether heat can be kept beside the model."""
    directory = description.checkpoint.directory
    if os.access(directory, os.W_OK):
        return fine("heat", f"is kept in {directory}")
    return note(
        "heat",
        f"{directory} cannot be written",
        "which experts are busy is forgotten: every run begins cold",
        f"chmod u+w {directory}, or keep a copy of your own",
    )


def check_plan(settings: Settings) -> Finding:
    """Whether it fits, and how much of it."""
    try:
        plan = prepare(settings).plan
    except BudgetError as error:
        return fault("budget", str(error), "the model does not start", "see the message")
    except ColibriError as error:
        return broken(error)
    return plan_finding(plan)


def plan_finding(plan: Plan) -> Finding:
    """What a plan means."""
    share = plan.num_slots / plan.num_experts if plan.num_experts else 1.0
    facts = {
        "budget_bytes": plan.budget_bytes,
        "num_slots": plan.num_slots,
        "num_experts": plan.num_experts,
        "context_length": plan.context_length,
    }
    shown = (
        f"{format_bytes(plan.budget_bytes)}: {share:.0%} of the experts in memory, context of "
        f"{plan.context_length:,} tokens"
    )
    if share < 0.1:
        return slow(
            "budget",
            shown,
            "nearly every expert is read from disk",
            "more --ram, experts in int4 (coli convert), or a shorter --context-length",
            **facts,
        )
    return fine("budget", shown, **facts)
