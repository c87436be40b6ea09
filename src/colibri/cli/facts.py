"""What `coli info` tells, as one mapping."""

from __future__ import annotations

import math
from typing import Any

from colibri.checkpoint.config import read_config
from colibri.checkpoint.index import Checkpoint
from colibri.cli.parts import parts_of, with_heads
from colibri.errors import IncompleteModelError
from colibri.kernels import why_reference
from colibri.kernels.api import Kernels
from colibri.kernels.cpus import affinity_mask
from colibri.kernels.native import NativeKernels
from colibri.llm.defaults import GenerationDefaults
from colibri.llm.loading import end_ids, make_kernels
from colibri.llm.location import find_model
from colibri.memory.devices import Reading
from colibri.memory.mirror import open_mirrors
from colibri.memory.numa import find_placement
from colibri.memory.opening import known_reading
from colibri.models.blueprint import Blueprint
from colibri.models.description import Description
from colibri.settings import Settings
from colibri.text import ChatTemplate, Tokenizer


def facts_of(settings: Settings) -> dict[str, Any]:
    """Everything about the model that the settings name, and about what would compute it."""
    checkpoint = Checkpoint.open(find_model(settings), settings.family)
    description = Description.of(checkpoint)
    parts = parts_of(with_heads(checkpoint))
    return {
        **facts_of_model(description),
        "parts": parts,
        "bytes_per_token": sum(part["bytes_per_token"] for part in parts),
        **facts_of_text(description),
        **facts_of_reading(description, settings),
        **facts_of_kernels(make_kernels(settings)),
    }


def facts_of_model(description: Description) -> dict[str, Any]:
    """Shape, formats and files; parameters count matrices, norms and biases alike."""
    blueprint, checkpoint = description.blueprint, description.checkpoint
    config, sparse = blueprint.config, blueprint.sparse_layers()
    layouts = description.experts.layers
    dense = sum(math.prod(tensor.parameter.shape) for tensor in description.dense)
    per_expert = {x.layer: sum(p.rows * p.columns for p in x.parts) for x in layouts}
    files = {tensor.spec.file for tensor in description.dense} | set(description.experts.files)
    files |= {spec.file for table in description.tables for spec in table.shards}
    on_disk = sum(math.prod(table.parameter.shape) for table in description.tables)
    by_rows = sum(table.num_read_per_token for table in description.tables)
    active = sum(moe.num_experts_per_tok * per_expert[i] for i, moe in sparse)
    return {
        "model": str(checkpoint.place),
        "family": blueprint.family.model_type,
        "num_layers": config.num_hidden_layers,
        "num_moe_layers": len(sparse),
        "num_experts": max((x.num_experts for x in layouts), default=0),
        "num_experts_per_tok": max((moe.num_experts_per_tok for _, moe in sparse), default=0),
        "num_parameters": dense
        + on_disk
        + sum(x.num_experts * per_expert[x.layer] for x in layouts),
        "num_active_parameters": dense + by_rows + active,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "formats": list(description.formats()),
        "num_files": len(files),
        "dense_bytes": description.dense_nbytes,
        "table_bytes": sum(table.nbytes for table in description.tables),
        "experts_bytes": sum(x.num_experts * x.record_nbytes for x in layouts),
        "left_aside": description.left_aside,
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
    directory = description.checkpoint.place
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory) if tokenizer is not None else None
    return {
        "tokenizer": None if tokenizer is None else tokenizer.vocab_size,
        "chat_template": template is not None,
        "eos_ids": sorted(end_ids(description, GenerationDefaults.load(directory), tokenizer)),
        "missing": [
            *(["tokenizer"] if tokenizer is None else []),
            *(["chat template"] if template is None else []),
        ],
    }


def facts_of_incomplete(settings: Settings, error: IncompleteModelError) -> dict[str, Any]:
    """What config.json tells of a model some of whose files or tensors are not there.

    Raises:
        CheckpointError: config.json is not there either, or broken.
    """
    directory = find_model(settings)
    if not (directory / "config.json").is_file():
        raise error
    blueprint = Blueprint.of(read_config(directory / "config.json"))
    config, sparse = blueprint.config, blueprint.sparse_layers()
    return {
        "model": str(directory),
        "family": blueprint.family.model_type,
        "num_layers": config.num_hidden_layers,
        "num_moe_layers": len(sparse),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "missing": [str(error)],
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
