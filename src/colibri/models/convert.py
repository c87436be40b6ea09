"""`coli convert`: a checkpoint of any family as a container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from colibri.checkpoint.container_manifest import MANIFEST, Manifest
from colibri.checkpoint.conversion import HEADS, Conversion, ExpertFormats
from colibri.checkpoint.convert import ConvertProgress, ConvertReport, convert
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.recode import DenseParameter
from colibri.checkpoint.safetensors import TensorSpec
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.formats import Format, get_format
from colibri.models.blueprint import HEAD_STEM
from colibri.models.description import DenseTensor, Description, TableTensor
from colibri.nn.parameter import ROUNDED
from colibri.nn.trunk import LM_HEAD

NO_HEADS = "none"

_SHARD_BYTES = 256 << 20  # of a table


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of the formats that parts of a model get; None keeps theirs.

    Attributes:
        experts: of routed experts.
        down: of their down_proj, where it should be another.
        dense: of dense matrices and of the embedding. Norms, biases and routers always keep theirs.
        head: of the output matrix, where it should be another than `dense`.
        mtp: of experts and matrices of heads that draft further tokens, as far as those are floats
            or fp8; `none` leaves heads aside.
    """

    experts: str | None = "int4-g64"
    down: str | None = None
    dense: str | None = None
    head: str | None = None
    mtp: str | None = "int8-g64"


def plan_conversion(source: Path, formats: Formats, importance: Path | None = None) -> Conversion:
    """What converting the checkpoint `source` would do; nothing is written.

    `importance` is a file of `coli eval importance`, by which scales of experts are chosen.

    Raises:
        CheckpointError: `source` or `importance` is broken, incomplete or of another model.
        UnsupportedModelError: an unknown format, one that would round coded weights again, or
            `importance` where no expert is rounded.
    """
    wanted = {field.name: _format(getattr(formats, field.name)) for field in fields(formats)}
    checkpoint = Checkpoint.open(source)
    description = _describe(checkpoint, formats.mtp != NO_HEADS)
    blueprint = description.blueprint
    first_head = len(blueprint.layers) if blueprint.heads else None
    chosen = _Chosen(wanted["dense"], wanted["head"] or wanted["dense"], wanted["mtp"])
    if wanted["head"] is not None and blueprint.trunk.tied:
        raise UnsupportedModelError(
            f"{source}: its output matrix is the embedding, which gets the format of `dense`: leave"
            " `head` out"
        )
    parameters = [chosen.parameter(tensor) for tensor in description.dense]
    for table in description.tables:
        parameters += _shards(table)
    conversion = Conversion.of(
        description.checkpoint,
        description.experts,
        parameters,
        family=blueprint.family.model_type,
        formats=ExpertFormats(
            wanted["experts"],
            wanted["down"],
            _fitting(wanted["mtp"], description, first_head),
            first_head,
        ),
        left_aside=description.left_aside,
    )
    return conversion if importance is None else conversion.weighed(importance)


def plan_repair(source: Path, manifest: Manifest, importance: Path | None = None) -> Conversion:
    """The conversion of `source` that made the container of a manifest.

    Raises:
        CheckpointError: `source` is broken, or has not the tensors that the container has.
    """
    description = Description.of(
        Checkpoint.open(source), mtp=any(name.startswith(HEAD_STEM) for name in manifest.dense)
    )
    parameters = [_Chosen(None, None, None).parameter(tensor) for tensor in description.dense]
    for table in description.tables:
        parameters += _shards(table)
    layers = {layer.layer for layer in description.experts.layers}
    if {
        each.name for each in parameters
    } != manifest.dense.keys() or layers != manifest.layouts.keys():
        raise CheckpointError(
            f"{source}: has other tensors than {MANIFEST} names: this is not the source that it was"
            " converted from"
        )
    conversion = Conversion(
        checkpoint=description.checkpoint,
        index=description.experts,
        layouts=tuple(manifest.layouts[layer.layer] for layer in description.experts.layers),
        dense=tuple(replace(each, format=manifest.dense[each.name][0]) for each in parameters),
        family=manifest.family,
        about=manifest.source,
        first_head=len(description.blueprint.layers) if description.blueprint.heads else None,
    )
    return conversion if importance is None else conversion.weighed(importance)


def convert_model(
    source: Path,
    destination: Path,
    *,
    experts: str | None = "int4-g64",
    down: str | None = None,
    dense: str | None = None,
    head: str | None = None,
    mtp: str | None = "int8-g64",
    importance: Path | None = None,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> ConvertReport:
    """Write the checkpoint `source` to `destination` as a container.

    Args:
        source: a checkpoint of a known family, Hugging Face's or a container.
        destination: empty, missing, or left by an interrupted run of the same conversion.
        experts: see `Formats`, as for those that follow.
        down: see there.
        dense: see there.
        head: see there.
        mtp: see there.
        importance: see `plan_conversion`.
        progress: told after every expert.

    Raises:
        CheckpointError: `source` is broken or incomplete, `destination` holds something else, or
            its disk is too small.
        UnsupportedModelError: an unknown format, or one that would round coded weights again.
        NumericsError: a weight is not finite.
        WriteError: the disk is full or fails.
    """
    conversion = plan_conversion(source, Formats(experts, down, dense, head, mtp), importance)
    return convert(conversion, destination, progress=progress)


def _format(name: str | None) -> Format | None:
    return None if name in (None, NO_HEADS) else get_format(str(name))


def _describe(checkpoint: Checkpoint, with_heads: bool) -> Description:
    """The checkpoint understood, with its drafting heads where it has any that are known."""
    plain = Description.of(checkpoint)
    if not with_heads or not plain.blueprint.family.mtp or HEADS not in plain.left_aside:
        return plain
    try:
        return Description.of(checkpoint, mtp=True)
    except CheckpointError as error:
        raise type(error)(
            f"drafting heads: {error}; set `mtp` to {NO_HEADS} to leave them"
        ) from None


def _fitting(mtp: Format | None, description: Description, first_head: int | None) -> Format | None:
    """The format for experts of heads: None, which keeps theirs, where those are codes."""
    heads = (
        x for x in description.experts.layers if first_head is not None and x.layer >= first_head
    )
    coded = any(part.format.is_coded for layer in heads for part in layer.parts)
    return None if coded else mtp


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Formats of dense tensors."""

    dense: Format | None
    head: Format | None
    mtp: Format | None

    def parameter(self, tensor: DenseTensor) -> DenseParameter:
        """The tensor, and what becomes of it."""
        parameter, part, wanted = tensor.parameter, "dense", self.dense
        if parameter.name.startswith(HEAD_STEM):
            part, wanted = HEADS, None if tensor.stored.is_coded else self.mtp
        elif parameter.name == LM_HEAD:
            part, wanted = "head", self.head
        fmt = wanted if wanted and parameter.kind in ROUNDED else tensor.stored
        return DenseParameter(
            parameter.name, parameter.shape, tensor.spec, tensor.stored, fmt, tensor.matrix, part
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
        DenseParameter(name, spec.shape, spec, stored, stored, part="tables")
        for name, spec in zip(names, cut, strict=True)
    ]
