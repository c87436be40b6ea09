"""`coli convert`: a checkpoint of any family as a container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from colibri.checkpoint.convert import ConvertProgress, ConvertReport, DenseParameter, convert
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.safetensors import TensorSpec
from colibri.formats import Format, get_format
from colibri.models.description import DenseTensor, Description, TableTensor
from colibri.nn.parameter import ROUNDED

_SHARD_BYTES = 256 << 20  # of a table


def convert_model(
    source: Path,
    destination: Path,
    *,
    experts: str | None = "int4-g64",
    down: str | None = None,
    dense: str | None = None,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> ConvertReport:
    """Write the checkpoint `source` to `destination` as a container.

    Args:
        source: a checkpoint of a known family, Hugging Face's or a container.
        destination: empty, missing, or left by an interrupted run of the same conversion.
        experts: format of routed experts; None keeps theirs.
        down: format of their down_proj, where it should be another.
        dense: format of dense matrices and of the embedding; None keeps theirs. Norms, biases and
            routers always keep theirs.
        progress: told after every expert.

    Raises:
        CheckpointError: `source` is broken or incomplete, `destination` holds something else, or
            its disk is too small.
        UnsupportedModelError: an unknown format, or one that would round coded weights again.
        NumericsError: a weight is not finite.
    """
    expert_format = None if experts is None else get_format(experts)
    dense_format = None if dense is None else get_format(dense)
    checkpoint = Checkpoint.open(source)
    description = Description.of(checkpoint)
    parameters = [_parameter(tensor, dense_format) for tensor in description.dense]
    for table in description.tables:
        parameters += _shards(table)
    return convert(
        checkpoint,
        description.experts,
        parameters,
        destination,
        family=description.blueprint.family.model_type,
        left_aside=description.left_aside,
        experts=expert_format,
        down=None if down is None else get_format(down),
        progress=progress,
    )


def _shards(table: TableTensor) -> list[DenseParameter]:
    """A table's rows in shards as it has them, or smaller ones: each is in memory for a while."""
    cut: list[TensorSpec] = []
    for spec in table.shards:
        rows, nbytes = spec.shape[0], table.stored.nbytes((1, spec.shape[1]))
        for first in range(0, rows, most := max(1, _SHARD_BYTES // max(1, nbytes))):
            shape = (min(most, rows - first), spec.shape[1])
            offset = spec.offset + first * (nbytes + spec.skip)
            cut.append(replace(spec, shape=shape, offset=offset, nbytes=shape[0] * nbytes))
    stem, stored = table.parameter.name.removesuffix("weight"), table.stored
    names = [f"{stem}shard_{number}.weight" for number in range(len(cut))]
    if len(cut) == 1:
        names = [table.parameter.name]
    return [
        DenseParameter(name, spec.shape, spec, stored, stored)
        for name, spec in zip(names, cut, strict=True)
    ]


def _parameter(tensor: DenseTensor, dense: Format | None) -> DenseParameter:
    parameter = tensor.parameter
    fmt = dense if dense and parameter.kind in ROUNDED else tensor.stored
    return DenseParameter(
        parameter.name, parameter.shape, tensor.spec, tensor.stored, fmt, tensor.matrix
    )
