"""`coli info`: what a checkpoint is, and what would compute it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from colibri.checkpoint.index import Checkpoint
from colibri.cli.options import MODEL_ARGUMENT, with_settings
from colibri.kernels import why_reference
from colibri.kernels.api import Kernels
from colibri.kernels.cpus import affinity_mask
from colibri.kernels.native import NativeKernels
from colibri.llm.loading import find_model, make_kernels
from colibri.memory.devices import Reading
from colibri.memory.mirror import open_mirrors
from colibri.memory.numa import find_placement
from colibri.memory.opening import known_reading
from colibri.models.description import Description
from colibri.settings import Settings
from colibri.text import ChatTemplate, Tokenizer
from colibri.units import format_bytes

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@with_settings
def info(path: MODEL_ARGUMENT = None, *, as_object: JSON = False, settings: Settings) -> None:
    """Show what a checkpoint is."""
    directory = find_model(settings)
    description = Description.of(Checkpoint.open(directory))
    kernels = make_kernels(settings)
    facts = {
        **facts_of_model(description),
        **facts_of_text(description),
        **facts_of_reading(description, settings),
        **facts_of_kernels(kernels),
    }
    if as_object:
        print(json.dumps(facts))
        return
    shown = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows(facts):
        shown.add_row(name, value)
    Console(highlight=False).print(shown)


def facts_of_model(description: Description) -> dict[str, Any]:
    """Shape, formats and files; parameters count matrices, norms and biases alike."""
    blueprint, checkpoint = description.blueprint, description.checkpoint
    config, moe_layers = blueprint.config, blueprint.moe_layers()
    layouts = description.experts.layers
    dense = sum(math.prod(tensor.parameter.shape) for tensor in description.dense)
    per_expert = {x.layer: sum(p.rows * p.columns for p in x.parts) for x in layouts}
    files = {tensor.spec.file for tensor in description.dense} | set(description.experts.files)
    active = sum(moe.num_experts_per_tok * per_expert[i] for i, moe in moe_layers)
    return {
        "model": str(checkpoint.directory),
        "family": blueprint.family.model_type,
        "num_layers": config.num_hidden_layers,
        "num_moe_layers": len(moe_layers),
        "num_experts": max((moe.num_experts for _, moe in moe_layers), default=0),
        "num_experts_per_tok": max((moe.num_experts_per_tok for _, moe in moe_layers), default=0),
        "num_parameters": dense + sum(x.num_experts * per_expert[x.layer] for x in layouts),
        "num_active_parameters": dense + active,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "formats": list(description.formats()),
        "num_files": len(files),
        "dense_bytes": description.dense_nbytes,
        "experts_bytes": sum(x.num_experts * x.record_nbytes for x in layouts),
        "ignored_files": [file.name for file in checkpoint.ignored_files],
    }


def facts_of_reading(description: Description, settings: Settings) -> dict[str, Any]:
    """How experts would be read, from where, and where slots would lie."""
    index, config = description.experts, settings.reader
    known = known_reading(index, config.cache) if index.files else None
    reading = known or Reading()
    placement = find_placement()
    return {
        "reader": {
            "direct": reading.direct,
            "threads": config.threads or reading.threads,
            "block": reading.block if config.block is None else config.block,
            "bytes_per_s": reading.bytes_per_s or None,
            "measured": known is not None,
        },
        "mirrors": [
            {"directory": str(found.directory), "num_experts": int(found.present.sum())}
            for found in open_mirrors(config.mirrors, index)
        ],
        "memory_nodes": None if placement is None else str(placement),
    }


def facts_of_text(description: Description) -> dict[str, Any]:
    """Tokenizer and chat template."""
    directory = description.checkpoint.directory
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory) if tokenizer is not None else None
    return {
        "tokenizer": None if tokenizer is None else tokenizer.vocab_size,
        "chat_template": template is not None,
        "eos_ids": [] if tokenizer is None else sorted(tokenizer.eos_ids),
    }


def facts_of_kernels(kernels: Kernels) -> dict[str, Any]:
    """What would compute, and on which processors."""
    native = kernels if isinstance(kernels, NativeKernels) else None
    return {
        "kernels": kernels.name,
        "isa": None if native is None else native.isa,
        "threads": None if native is None else native.threads,
        "cpu_mask": affinity_mask(),
        "activations": kernels.activations,
        "why_reference": why_reference(),
    }


def rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts as people read them."""
    yield "model", facts["model"]
    yield "family", facts["family"]
    yield "layers", f"{facts['num_layers']}, {facts['num_moe_layers']} with experts"
    if facts["num_experts"]:
        yield "experts", f"{facts['num_experts']} a layer, {facts['num_experts_per_tok']} a token"
    active = _in_billions(facts["num_active_parameters"])
    yield "parameters", f"{_in_billions(facts['num_parameters'])}, {active} active"
    yield "context", f"{facts['max_position_embeddings']:,} positions"
    yield "vocabulary", f"{facts['vocab_size']:,} ids"
    yield "formats", ", ".join(facts["formats"])
    dense, experts = format_bytes(facts["dense_bytes"]), format_bytes(facts["experts_bytes"])
    yield "size", f"{dense} dense, {experts} experts, in {facts['num_files']} files"
    if facts["ignored_files"]:
        yield "not read", ", ".join(facts["ignored_files"])
    tokens = facts["tokenizer"]
    yield "tokenizer", "none: opens for token ids" if tokens is None else f"{tokens:,} tokens"
    yield "chat template", "yes" if facts["chat_template"] else "none: continues text"
    yield "kernels", f"{facts['kernels']}, activations {facts['activations']}"
    if facts["isa"]:
        yield "processor", _processor(facts)
    if facts["why_reference"]:
        yield "", f"no native ones: {facts['why_reference']}"
    yield "reader", _reader(facts["reader"])
    for mirror in facts["mirrors"]:
        yield "mirror", f"{mirror['directory']}, {mirror['num_experts']:,} experts"
    if facts["memory_nodes"]:
        yield "expert slots", facts["memory_nodes"]


def _reader(reader: dict[str, Any]) -> str:
    kind = "direct" if reader["direct"] else "buffered"
    block = f"in blocks of {format_bytes(reader['block'])}" if reader["block"] else "whole"
    how = f"{kind}, {reader['threads']} at a time, {block}"
    if not reader["measured"]:
        return f"{how} (large models are measured at first use)"
    return f"{how}; measured {format_bytes(reader['bytes_per_s'])}/s"


def _processor(facts: dict[str, Any]) -> str:
    threads, mask = facts["threads"], facts["cpu_mask"]
    where = "" if mask is None else f" on CPU {mask}"
    return f"{facts['isa']}, {threads} thread{'' if threads == 1 else 's'}{where}"


def _in_billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
