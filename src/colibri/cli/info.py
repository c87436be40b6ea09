"""`coli info`: what a checkpoint is, and what would compute it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from colibri.cli.options import JSON, KERNELS, MODEL_ARGUMENT, READING, with_some
from colibri.cli.progress import Reporter
from colibri.errors import CheckpointError, IncompleteModelError
from colibri.llm.location import find_model
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

_SUFFIX = ".safetensors"


@with_some("model", "family", *KERNELS, *READING)
def info(path: MODEL_ARGUMENT = None, *, as_object: JSON = False, settings: Settings) -> None:
    """Show what a checkpoint is."""
    with Reporter() as reporter:
        reporter.opening(settings)
        facts, error = _facts(settings)
    if as_object:
        print(json.dumps(facts))
    else:
        _show(facts)
    if error is not None:
        raise error


def _facts(settings: Settings) -> tuple[dict[str, Any], CheckpointError | None]:
    """What is known, and why that is not all."""
    from colibri.cli.facts import facts_of, facts_of_incomplete
    from colibri.cli.parts import facts_of_file

    if settings.model is not None and settings.model.endswith(_SUFFIX):
        return facts_of_file(find_model(settings)), None
    try:
        return facts_of(settings), None
    except IncompleteModelError as error:
        return facts_of_incomplete(settings, error), error


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(show_header=False, box=None, pad_edge=False)
    told = file_rows(facts) if "file" in facts else rows(facts)
    for name, value in told:
        shown.add_row(name, value)
    console = Console(highlight=False)
    console.print(shown)
    if facts.get("parts"):
        console.print(_parts(facts["parts"]))


def _parts(parts: list[dict[str, Any]]) -> Table:
    """A row for each part."""
    from rich.table import Table

    columns = ("part", "formats", "parameters", "active", "size", "a token reads")
    shown = Table(*columns, box=None, pad_edge=False)
    for column in shown.columns[2:]:
        column.justify = "right"
    for part in parts:
        counts = (part["num_parameters"], part["num_active_parameters"])
        sizes = (part["bytes"], part["bytes_per_token"])
        formats = ", ".join(part["formats"])
        shown.add_row(part["part"], formats, *map(_in_billions, counts), *map(format_bytes, sizes))
    return shown


def file_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts of one file as people read them."""
    yield "file", facts["file"]
    yield "size", format_bytes(facts["bytes"])
    yield "tensors", f"{facts['num_tensors']:,}, {_in_billions(facts['num_parameters'])} numbers"
    for dtype, nbytes in facts["dtypes"].items():
        yield dtype, format_bytes(nbytes)
    for stem, count in facts["tensors"].items():
        yield "", f"{stem}: {count:,}"


def rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts as people read them."""
    yield "model", facts["model"]
    yield "family", facts["family"]
    yield "layers", f"{facts['num_layers']}, {facts['num_moe_layers']} with experts"
    if "parts" not in facts:
        yield "missing", "; ".join(facts["missing"])
        return
    if facts["num_experts"]:
        yield "experts", f"{facts['num_experts']} a layer, {facts['num_experts_per_tok']} a token"
    active = _in_billions(facts["num_active_parameters"])
    yield "parameters", f"{_in_billions(facts['num_parameters'])}, {active} active"
    yield "context", f"{facts['max_position_embeddings']:,} positions"
    yield "vocabulary", f"{facts['vocab_size']:,} ids"
    yield "formats", ", ".join(facts["formats"])
    dense, experts = format_bytes(facts["dense_bytes"]), format_bytes(facts["experts_bytes"])
    yield "size", f"{dense} dense, {experts} experts, in {facts['num_files']} files"
    if facts["left_aside"]:
        counts = [f"{part} ({count} tensors)" for part, count in facts["left_aside"].items()]
        yield "left aside", ", ".join(counts)
    if facts["ignored_files"]:
        yield "not read", ", ".join(facts["ignored_files"])
    tokens = facts["tokenizer"]
    yield "a token reads", f"up to {format_bytes(facts['bytes_per_token'])}"
    yield "end ids", ", ".join(map(str, facts["eos_ids"])) or "none"
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
