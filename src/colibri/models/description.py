"""A blueprint joined to a checkpoint's tensors: nothing is missing, nothing is left over."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from colibri.checkpoint.coding import NO_CODING, Coding, require_exact
from colibri.checkpoint.config import normalize
from colibri.checkpoint.conversion import HEADS
from colibri.checkpoint.divide import divide
from colibri.checkpoint.experts import ExpertIndex, index_experts
from colibri.checkpoint.gguf_latent import take_split_latent
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.rename import Census, Renaming
from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.storage import FLOAT_DTYPES, StoredMatrix, take_matrix
from colibri.errors import (
    CheckpointError,
    ConfigError,
    IncompleteModelError,
    UnsupportedModelError,
)
from colibri.formats import BF16, F16, F32, ID_FORMATS, FloatFormat, Format, IntegerFormat
from colibri.formats.packing import PackKind
from colibri.models.blueprint import Blueprint
from colibri.models.gguf import adopted
from colibri.nn.parameter import ROUNDED, VECTORS, Parameter

_ALIGNMENT = 64
_ID_DTYPES = {name.upper(): fmt for name, fmt in ID_FORMATS.items()}
_HEAD = re.compile(r"mtp\.layers\.(\d{1,4})\.")


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """One dense tensor, where it is stored and how it will be resident.

    Attributes:
        stored: format of the bytes in the file, or that holds them exactly.
        resident: the same for matrices, unless they are rounded at load; float32 for norms, biases
            and coded absorbed matrices.
    """

    parameter: Parameter
    spec: TensorSpec
    stored: Format
    resident: Format
    matrix: StoredMatrix | None = None  # codes and scales, where the bytes are not resident ones

    @property
    def shape(self) -> tuple[int, int]:
        """`[rows, columns]`; a vector is one row, whatever its shape."""
        shape = self.parameter.shape
        if self.parameter.kind in VECTORS:
            return (1, math.prod(shape))
        return (shape[0], shape[1])

    @property
    def is_rounded(self) -> bool:
        """Whether its numbers are rounded at load."""
        return self.resident.is_coded and self.resident is not self.stored

    @property
    def resident_nbytes(self) -> int:
        """Bytes it takes in memory, rounded up to the alignment of kernels."""
        return -(-self.resident.resident_nbytes(self.shape) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class TableTensor:
    """A table that stays on disk.

    Attributes:
        shards: one after another, by their names in `names`.
    """

    parameter: Parameter
    names: tuple[str, ...]
    shards: tuple[TensorSpec, ...]
    stored: FloatFormat

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(spec.nbytes for spec in self.shards)

    @property
    def num_read_per_token(self) -> int:
        """Numbers that one token reads."""
        return self.parameter.rows_per_token * self.parameter.shape[1]

    @property
    def nbytes_per_token(self) -> int:
        """Bytes that one token reads."""
        return self.parameter.rows_per_token * self.stored.nbytes((1, self.parameter.shape[1]))


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint understood: every tensor has its place.

    Attributes:
        ignored: names of tensors that are knowingly not used.
        coding: what is rounded at load.
        tables: what stays on disk and is read row by row.
    """

    checkpoint: Checkpoint
    blueprint: Blueprint
    dense: tuple[DenseTensor, ...]
    experts: ExpertIndex
    ignored: tuple[str, ...] = ()
    coding: Coding = NO_CODING
    tables: tuple[TableTensor, ...] = ()

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, coding: Coding = NO_CODING, *, mtp: bool = False
    ) -> Description:
        """Take the census; `mtp` asks for the heads that draft further tokens.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped, of an unknown dtype, left over, or
                coded where `coding` would round it again; named.
        """
        checkpoint = adopted(checkpoint)
        try:
            blueprint = Blueprint.of(checkpoint.config)
            quantization = Quantization.read(normalize(checkpoint.config))
        except (ConfigError, UnsupportedModelError) as error:
            raise type(error)(f"{checkpoint.place}: {error}") from None
        rename = (*blueprint.family.rename, *(blueprint.head_rename if mtp else ()))
        tensors = Renaming(rename).apply(checkpoint.tensors)
        if mtp:
            blueprint = blueprint.with_heads(_num_heads(checkpoint, tensors))
        census = Census(divide(tensors, blueprint.family.divide))
        parameters = blueprint.parameters()
        dense = tuple(
            _coded(_dense(checkpoint, census, parameter, quantization), coding.dense)
            for parameter in parameters
            if parameter.kind != "table"
        )
        tables = tuple(_table(census, each) for each in parameters if each.kind == "table")
        requests = blueprint.expert_layers()
        if checkpoint.gguf is not None:  # whose rows are in order, whatever else is published
            requests = [replace(each, transposed=False, interleaved=False) for each in requests]
        if checkpoint.container is not None:
            experts = checkpoint.container.expert_index(
                requests, coding.experts, len(blueprint.layers)
            )
        else:
            experts = index_experts(census, requests, quantization, coding.experts)
        ignored = census.finish(blueprint.ignored())
        return cls(checkpoint, blueprint, dense, experts, ignored, coding, tables)

    @property
    def left_aside(self) -> dict[str, int]:
        """How many tensors are not used, by the part of the checkpoint that they belong to."""
        return dict(Counter(self._part(name) for name in self.ignored))

    def _part(self, name: str) -> str:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.startswith(("mtp.", "model.mtp")) or (
            layer and int(layer[1]) >= len(self.blueprint.layers)
        ):
            return HEADS
        if layer:
            return re.sub(r"(?<=\.)\d+(?=\.)", "*", name).removesuffix(".weight")
        found = re.match(r"(model\.)?[^.]+", name)
        return found.group() if found else name

    @property
    def left_aside_text(self) -> str:
        """The same in words."""
        counts = (
            f"{part} ({count} tensor{'' if count == 1 else 's'})"
            for part, count in self.left_aside.items()
        )
        return ", ".join(counts)

    @property
    def rounded(self) -> dict[str, str]:
        """`dense` and `experts`, where any of their numbers are rounded at load, and to what."""
        found = {}
        if any(tensor.is_rounded for tensor in self.dense):
            found["dense"] = str(self.coding.dense)
        if any(step.kind == PackKind.ENCODE for x in self.experts.layers for step in x.packings):
            found["experts"] = str(self.coding.experts)
        return found

    @property
    def dense_nbytes(self) -> int:
        """Resident bytes of the dense part."""
        return sum(tensor.resident_nbytes for tensor in self.dense)

    @property
    def float_format(self) -> FloatFormat:
        """The checkpoint's own float format: the embedding's, bf16 where that is coded.

        Of a GGUF file it is f16, as its users expect.
        """
        if self.checkpoint.gguf is not None:
            return F16
        stored = self.dense[0].stored
        return stored if isinstance(stored, FloatFormat) else BF16

    def formats(self) -> Iterator[str]:
        """Names of the formats that hold weights, experts first."""
        names = [part.format.name for layer in self.experts.layers for part in layer.parts]
        dense = (t.stored.name for t in self.dense if t.parameter.kind != "ids")
        yield from dict.fromkeys([*names, *dense])


def _num_heads(checkpoint: Checkpoint, tensors: Iterable[str]) -> int:
    """How many drafting heads there are."""
    found = {match[1] for name in tensors if (match := _HEAD.match(name))}
    if not found:
        why = "layers behind the last, or tensors `mtp.*`"
        if checkpoint.container is not None:
            why = "the checkpoint it was made from may have some: convert that again"
        raise IncompleteModelError(
            f"{checkpoint.directory}: holds no heads that draft further tokens ({why}): leave "
            "`mtp` out"
        )
    return 1 + max(map(int, found))


def _dense(
    checkpoint: Checkpoint, census: Census, parameter: Parameter, quantization: Quantization
) -> DenseTensor:
    container = checkpoint.container
    if container is not None and parameter.name in container.coded:
        coded, shape = container.coded[parameter.name]
        if shape != parameter.shape:
            raise UnsupportedModelError(
                f"{checkpoint.directory / 'colibri.json'}: {parameter.name} has shape "
                f"{list(shape)}, wanted {list(parameter.shape)}; convert the model again"
            )
        spec = census.take(parameter.name, (coded.resident_nbytes(shape),))
        return DenseTensor(parameter, spec, coded, _resident(parameter, coded))
    if container is None and parameter.kind not in VECTORS:
        rows, columns = parameter.shape
        matrix: StoredMatrix | None = None
        if parameter.kind == "absorbed":
            matrix = take_split_latent(census, parameter.name, (rows, columns))
        if matrix is None:
            matrix = take_matrix(census, parameter.name, (rows, columns), quantization)
        if matrix is not None:
            fmt = matrix.storage.format
            return DenseTensor(parameter, matrix.codes, fmt, _resident(parameter, fmt), matrix)
    spec = census.take(parameter.name, parameter.shape)
    stored = _plain_format(spec, _ID_DTYPES if parameter.kind == "ids" else FLOAT_DTYPES)
    return DenseTensor(parameter, spec, stored, _resident(parameter, stored))


def _table(census: Census, parameter: Parameter) -> TableTensor:
    """Take a table, which is one tensor or shards that follow one another."""
    name, (rows, columns) = parameter.name, parameter.shape
    stem = name.removesuffix("weight")
    names: list[str] = []
    shards: list[TensorSpec] = []
    while (shard := f"{stem}shard_{len(names)}.weight") in census:
        found = census.get(shard)
        height = found.shape[0] if found is not None and len(found.shape) == 2 else rows
        names.append(shard)
        shards.append(census.take(shard, (height, columns)))
    if not names or (total := sum(spec.shape[0] for spec in shards)) == 0:
        names, shards, total = [name], [census.take(name, (rows, columns))], rows
    if total != rows:
        raise CheckpointError(
            f"{shards[-1].file}: the {len(shards)} shards of {name} have {total:,} rows, wanted"
            f" {rows:,}; fetch the checkpoint again"
        )
    stored = {_float_format(spec) for spec in shards}
    if len(stored) > 1:
        raise UnsupportedModelError(f"{shards[0].file}: the shards of {name} have different dtypes")
    return TableTensor(parameter, tuple(names), tuple(shards), stored.pop())


def _float_format(spec: TensorSpec) -> FloatFormat:
    found = _plain_format(spec, FLOAT_DTYPES)
    assert isinstance(found, FloatFormat)
    return found


def _coded(tensor: DenseTensor, coded: IntegerFormat | None) -> DenseTensor:
    """The tensor, resident in the format to which what may be rounded is rounded."""
    if coded is None or tensor.parameter.kind not in ROUNDED:
        return tensor
    require_exact(tensor.stored, coded, f"{tensor.spec.file}: {tensor.spec.name}")
    return replace(tensor, resident=coded)


def _resident(parameter: Parameter, stored: Format) -> Format:
    """As it is stored, but for vectors and for what is coded and will be absorbed."""
    coded = parameter.kind == "absorbed" and not isinstance(stored, FloatFormat)
    return F32 if coded or parameter.kind in VECTORS else stored


def _plain_format(spec: TensorSpec, known: Mapping[str, Format]) -> Format:
    try:
        return known[spec.dtype]
    except KeyError:
        raise UnsupportedModelError(
            f"{spec.file.name}: tensor {spec.name} has dtype {spec.dtype}; such tensors may be "
            f"{', '.join(known)}"
        ) from None
