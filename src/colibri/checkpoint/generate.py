"""Writes seeded random checkpoints of any size, at the speed of the disk.

They become a container, or a checkpoint as it would be published, which float formats always do.
Names and shapes come from the caller, who knows the family.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.checkpoint.container_writer import ContainerWriter, require_directory, require_free
from colibri.checkpoint.experts import ExpertLayer
from colibri.checkpoint.published import StoredTensor, draw, tensors_of
from colibri.checkpoint.random_weights import RandomExperts, Tensor, random_matrix, resident_draw
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors_writer import DTYPE_OF_FORMAT, Entry, Pending, save_pending
from colibri.errors import CheckpointError
from colibri.formats import PANEL_ROWS, Bytes, Floats, Format, Shape
from colibri.kernels.api import ExpertPart

SPELLINGS = ("per-expert", "w1w3w2", "fused")
_STEMS = {
    "per-expert": ("gate_proj", "up_proj", "down_proj"),
    "w1w3w2": ("w1", "w3", "w2"),
}
Make = Callable[[RandomExperts], Iterator[Bytes]]
_SLACK_BYTES = 8 << 20  # headers, tokenizer and configs


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A dense tensor to be drawn: `mean + std * normal`, or different whole numbers in each row.

    Attributes:
        name: its name in the checkpoint.
        shape: its extents.
        format: how it is stored; coded formats take matrices without a mean.
        std: standard deviation.
        mean: what is added.
        rows: rows from here on are zero (where there is no mean); None draws all.
        below: whole numbers are below this; None draws normal ones.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    std: float
    mean: float = 0.0
    rows: int | None = None
    below: int | None = None

    @property
    def matrix(self) -> Shape:
        """`[N, K]`; whatever is no matrix is one row."""
        shape = self.shape
        return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))

    @property
    def nbytes(self) -> int:
        """Resident bytes, which are also those in the file."""
        return self.format.resident_nbytes(self.matrix)

    def draw(self, seed: int) -> Bytes:
        """Its resident bytes; they depend on seed and name alone."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        if self.below is not None:
            return self.format.encode(_different(self.matrix, self.below, rng))
        if not self.mean:
            return random_matrix(self.format, self.matrix, rng, self.std, self.rows)
        values = rng.standard_normal(self.matrix, np.float32)
        return self.format.encode(values * np.float32(self.std) + np.float32(self.mean))

    def published(self) -> Iterator[tuple[Entry, Callable[[int], Bytes]]]:
        """Its tensors in a published checkpoint, and what draws each with a seed."""
        if self.format.is_plain:
            dtype = DTYPE_OF_FORMAT[self.format.name]
            yield Entry(self.name, dtype, self.shape, self.nbytes), self.draw
            return
        stem = self.name.removesuffix(".weight")
        for number, tensor in enumerate(tensors_of(self.format, self.matrix)):
            entry = Entry(stem + tensor.tail, tensor.dtype, tensor.shape, tensor.nbytes)
            yield entry, partial(self._draw_stored, number, tensor)

    def _draw_stored(self, number: int, tensor: StoredTensor, seed: int) -> Bytes:
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode()), number])
        return draw(self.format, self.matrix, tensor, rng, self.std, self.rows)


def _different(shape: Shape, below: int, rng: np.random.Generator) -> Floats:
    """Rows of different whole numbers: steps of a random length from a random start on."""
    rows, columns = shape
    first = rng.integers(0, below, (rows, 1))
    step = rng.integers(1, below // columns + 1, (rows, 1))
    return ((first + step * np.arange(columns)) % below).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Everything that is written.

    Attributes:
        config: config.json.
        family: its model_type.
        dense: the dense tensors.
        layers: the MoE layers.
        format: of the experts.
        seed: of all weights.
        spelling: how a published checkpoint names experts, one of `SPELLINGS`; None for a
            container.
    """

    config: Mapping[str, Any]
    family: str
    dense: Sequence[RandomTensor]
    layers: Sequence[ExpertLayer]
    format: Format
    seed: int = 0
    spelling: str | None = None

    def layout(self, layer: ExpertLayer) -> RecordLayout:
        """How a record of the layer is laid out in a container."""
        sizes = (layer.hidden_size, layer.intermediate_size)
        return RecordLayout.uniform(self.format, *sizes, biased=layer.biased)

    def experts(self, layer: ExpertLayer) -> RandomExperts:
        """The layer's experts; they depend on seed and layer alone."""
        rng = np.random.default_rng([self.seed, layer.layer])
        draws = resident_draw(layer.biased)
        if self.spelling is not None:
            draws = partial(self._draw_published, layer)
        return RandomExperts(self.layout(layer).parts, layer.num_experts, rng, draws)

    def _draw_published(
        self, layer: ExpertLayer, part: ExpertPart, rng: np.random.Generator
    ) -> list[Tensor]:
        shape, std = (part.rows, part.columns), part.columns**-0.5
        return [
            Tensor(
                draw(self.format, shape, tensor, rng, std),
                PANEL_ROWS * tensor.row_nbytes if tensor.row_of == 1 else 0,
            )
            for tensor in self.stored(layer, shape)
        ]

    def stored(self, layer: ExpertLayer, shape: Shape) -> tuple[StoredTensor, ...]:
        """The tensors of a part of an expert in a published checkpoint."""
        fused = self.spelling == "fused"
        return tensors_of(self.format, shape, fused=fused, biased=layer.biased)

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint, without headers."""
        records = sum(layer.num_experts * self.expert_nbytes(layer) for layer in self.layers)
        return records + sum(self._dense_nbytes())

    def _dense_nbytes(self) -> Iterator[int]:
        for tensor in self.dense:
            if self.spelling is None:
                yield tensor.nbytes
            else:
                yield from (entry.nbytes for entry, _ in tensor.published())

    def expert_nbytes(self, layer: ExpertLayer) -> int:
        """Bytes of one expert: a record in a container, or its tensors as published."""
        layout = self.layout(layer)
        if self.spelling is None:
            return layout.nbytes
        shapes = [(part.rows, part.columns) for part in layout.parts]
        return sum(tensor.nbytes for shape in shapes for tensor in self.stored(layer, shape))


class _Meter:
    """Counts what has been made and tells it."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self._tell = 0, total, tell

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self._tell is not None:
            self._tell(self.done, self.total)


def generate_checkpoint(
    directory: Path,
    model: RandomModel,
    *,
    unrename: Sequence[tuple[str, str]] = (),
    shards: int = 1,
    source: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `model` with a byte-level tokenizer.

    Args:
        directory: made if need be; a container goes on where a killed run of its model stopped.
        model: what is written.
        unrename: (ours, theirs) substrings of names, applied to published checkpoints.
        shards: files of a published checkpoint.
        source: what a container's manifest says of its origin.
        progress: told bytes written and bytes in all.

    Raises:
        CheckpointError: the disk is too small, or the directory holds other files or cannot be
            written to.
    """
    require_directory(directory)
    require_free(directory, model.nbytes + _SLACK_BYTES)
    meter = _Meter(model.nbytes, progress)
    if model.spelling is None:
        _write_container(directory, model, source or {}, meter)
    else:
        _require_empty(directory)
        tensors = [_renamed(tensor, unrename) for tensor in _pending(model, meter)]
        save_pending(directory, model.config, tensors, shards=shards)
        write_byte_tokenizer(directory)


def _write_container(
    directory: Path, model: RandomModel, source: Mapping[str, str], meter: _Meter
) -> None:
    about = {"name": "generated", "seed": str(model.seed), **source}
    revision = hashlib.sha256(repr((model.config, model.dense, model.layers)).encode()).hexdigest()
    with ContainerWriter(directory, family=model.family, source=about, revision=revision) as writer:
        for layer in model.layers:
            _write_layer(writer, model, layer, meter)
        for tensor in model.dense:
            if not writer.has_dense(tensor.name):
                data = tensor.draw(model.seed)
                writer.dense_resident(tensor.name, data, tensor.format, tensor.shape)
            meter.add(tensor.nbytes)
        write_byte_tokenizer(directory)
        writer.finish(model.config)


def _write_layer(
    writer: ContainerWriter, model: RandomModel, layer: ExpertLayer, meter: _Meter
) -> None:
    layout = model.layout(layer)
    if writer.has_layer(layer.layer, layer.num_experts, layout):
        meter.add(layer.num_experts * layout.nbytes)
        return
    experts = model.experts(layer)
    with writer.layer(layer.layer, layer.num_experts, layout) as out:
        for expert in range(layer.num_experts):
            numbers = range(2 if layer.biased else 1)
            out.add_resident(
                expert, *(experts.tensor(expert, i, n) for n in numbers for i in range(3))
            )
            meter.add(layout.nbytes)


def _require_empty(directory: Path) -> None:
    """Old shards or an old index would be taken for parts of the new checkpoint."""
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory}: is not empty; name another directory or remove it")


def _pending(model: RandomModel, meter: _Meter) -> Iterator[Pending]:
    """Every tensor of a published checkpoint, in the order in which it is written."""

    def counted(data: Iterable[Bytes]) -> Iterator[Bytes]:
        for piece in data:
            yield piece
            meter.add(piece.nbytes)

    def dense(make: Callable[[int], Bytes]) -> Iterator[Bytes]:
        return counted([make(model.seed)])

    experts_of = lru_cache(maxsize=1)(model.experts)

    def experts(layer: ExpertLayer, make: Make) -> Iterator[Bytes]:
        return counted(make(experts_of(layer)))

    for tensor in model.dense:
        for entry, draw_one in tensor.published():
            yield Pending(entry, partial(dense, draw_one))
    for layer in model.layers:
        for entry, make in _expert_tensors(model, layer):
            yield Pending(entry, partial(experts, layer, make))


def _renamed(tensor: Pending, unrename: Sequence[tuple[str, str]]) -> Pending:
    name = tensor.entry.name
    for ours, theirs in unrename:
        name = name.replace(ours, theirs)
    return replace(tensor, entry=replace(tensor.entry, name=name))


def _expert_tensors(model: RandomModel, layer: ExpertLayer) -> Iterator[tuple[Entry, Make]]:
    """Each tensor of a layer's experts, and how its contents are made."""
    ffn, hidden = layer.intermediate_size, layer.hidden_size
    if model.spelling == "fused":
        yield from _fused_tensors(model, layer, "gate_up_proj", (0, 1), (ffn, hidden))
        yield from _fused_tensors(model, layer, "down_proj", (2,), (hidden, ffn))
        return
    for expert in range(layer.num_experts):
        for part, stem in enumerate(_STEMS[model.spelling or ""]):
            shape = (hidden, ffn) if part == 2 else (ffn, hidden)
            for number, tensor in enumerate(model.stored(layer, shape)):
                name = f"{layer.prefix}.{expert}.{stem}{tensor.tail}"
                entry = Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)
                yield entry, partial(_one, expert, part, number)


def _one(expert: int, part: int, number: int, experts: RandomExperts) -> Iterator[Bytes]:
    yield experts.tensor(expert, part, number)


def _fused_tensors(
    model: RandomModel, layer: ExpertLayer, stem: str, parts: tuple[int, ...], shape: Shape
) -> Iterator[tuple[Entry, Make]]:
    """The tensors that hold a part, or gate and up, of all experts."""
    for number, tensor in enumerate(model.stored(layer, shape)):
        extents = (len(parts) * tensor.rows, *tensor.row)
        # A family that stores floats `[E, in, out]` stores codes as everyone does.
        turned = layer.transposed and model.format.is_plain and len(extents) == 2
        shown = extents[::-1] if turned else extents
        nbytes = layer.num_experts * len(parts) * tensor.nbytes
        entry = Entry(
            f"{layer.prefix}.{stem}{tensor.tail}",
            tensor.dtype,
            (layer.num_experts, *shown),
            nbytes,
        )
        yield entry, partial(_joined, layer, parts, number, tensor, turned)


def _joined(
    layer: ExpertLayer,
    parts: tuple[int, ...],
    number: int,
    tensor: StoredTensor,
    turned: bool,
    experts: RandomExperts,
) -> Iterator[Bytes]:
    """Expert by expert, rows of its parts one after another or alternating, perhaps transposed."""
    item = tensor.row_nbytes // max(1, math.prod(tensor.row))
    for expert in range(layer.num_experts):
        rows = [
            experts.tensor(expert, part, number).reshape(tensor.rows, -1, item) for part in parts
        ]
        joined = np.stack(rows, axis=1) if layer.interleaved else np.concatenate(rows)
        joined = joined.reshape(-1, *rows[0].shape[1:])
        if turned:
            joined = joined.transpose(1, 0, 2)
        yield np.ascontiguousarray(joined).reshape(-1)
