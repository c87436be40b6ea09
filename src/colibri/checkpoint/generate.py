"""Writes seeded random checkpoints of any size, at the speed of the disk.

Float formats become a Hugging Face checkpoint, coded ones a container. Names and shapes come from
the caller, who knows the family.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.checkpoint.container_writer import ContainerWriter, require_free
from colibri.checkpoint.experts import ExpertLayer
from colibri.checkpoint.random_weights import RandomExperts, random_matrix
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors_writer import DTYPE_OF_FORMAT, Entry, Pending, save_pending
from colibri.errors import CheckpointError
from colibri.formats import Bytes, Format, Shape

SPELLINGS = ("per-expert", "w1w3w2", "fused")
_TAILS = {
    "per-expert": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "w1w3w2": ("w1.weight", "w3.weight", "w2.weight"),
}
_SLACK_BYTES = 8 << 20  # headers, tokenizer and configs


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A dense tensor to be drawn: `mean + std * normal`.

    Attributes:
        name: its name in the checkpoint.
        shape: its extents.
        format: how it is stored; coded formats take matrices without a mean.
        std: standard deviation.
        mean: what is added.
        rows: rows from here on are zero (where there is no mean); None draws all.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    std: float
    mean: float = 0.0
    rows: int | None = None

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
        if not self.mean:
            return random_matrix(self.format, self.matrix, rng, self.std, self.rows)
        values = rng.standard_normal(self.matrix, np.float32)
        return self.format.encode(values * np.float32(self.std) + np.float32(self.mean))


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
    """

    config: Mapping[str, Any]
    family: str
    dense: Sequence[RandomTensor]
    layers: Sequence[ExpertLayer]
    format: Format
    seed: int = 0

    def layout(self, layer: ExpertLayer) -> RecordLayout:
        """How a record of the layer is laid out in a container."""
        return RecordLayout.uniform(self.format, layer.hidden_size, layer.intermediate_size)

    def experts(self, layer: ExpertLayer) -> RandomExperts:
        """The layer's experts; they depend on seed and layer alone."""
        rng = np.random.default_rng([self.seed, layer.layer])
        return RandomExperts(self.layout(layer), layer.num_experts, rng)

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint, without headers."""
        records = sum(layer.num_experts * self.expert_nbytes(layer) for layer in self.layers)
        return records + sum(tensor.nbytes for tensor in self.dense)

    def expert_nbytes(self, layer: ExpertLayer) -> int:
        """Bytes of one expert: a record in a container, bare matrices in a float checkpoint."""
        layout = self.layout(layer)
        if not self.format.is_plain:
            return layout.nbytes
        return sum(part.format.nbytes((part.rows, part.columns)) for part in layout.parts)


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
    spelling: str = "per-expert",
    unrename: Sequence[tuple[str, str]] = (),
    shards: int = 1,
    source: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `model` with a byte-level tokenizer.

    Args:
        directory: made if need be; a container goes on where a killed run of its model stopped.
        model: what is written.
        spelling: how float experts are named, one of `SPELLINGS`; coded ones are records.
        unrename: (ours, theirs) substrings of names, applied to float checkpoints.
        shards: files of a float checkpoint.
        source: what a container's manifest says of its origin.
        progress: told bytes written and bytes in all.

    Raises:
        CheckpointError: the disk is too small, or the directory holds other files.
    """
    require_free(directory, model.nbytes + _SLACK_BYTES)
    meter = _Meter(model.nbytes, progress)
    if not model.format.is_plain:
        _write_container(directory, model, source or {}, meter)
    else:
        _require_empty(directory)
        tensors = [_renamed(tensor, unrename) for tensor in _pending(model, spelling, meter)]
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
            out.add_resident(expert, *experts.matrices(expert))
            meter.add(layout.nbytes)


def _require_empty(directory: Path) -> None:
    """Old shards or an old index would be taken for parts of the new checkpoint."""
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory}: is not empty; name another directory or remove it")


def _pending(model: RandomModel, spelling: str, meter: _Meter) -> Iterator[Pending]:
    """Every tensor of a float checkpoint, in the order in which it is written."""
    experts_of = lru_cache(maxsize=1)(model.experts)

    def draw(tensor: RandomTensor) -> Iterator[Bytes]:
        yield tensor.draw(model.seed)
        meter.add(tensor.nbytes)

    def copy(layer: ExpertLayer, wanted: Sequence[tuple[int, int]]) -> Iterator[Bytes]:
        for expert, part in wanted:
            data = experts_of(layer).matrix(expert, part)
            yield data
            meter.add(data.nbytes)

    for tensor in model.dense:
        yield Pending(_entry(tensor.name, tensor.format, tensor.shape), partial(draw, tensor))
    for layer in model.layers:
        for name, shape, wanted in _expert_tensors(layer, spelling):
            yield Pending(_entry(name, model.format, shape), partial(copy, layer, wanted))


def _renamed(tensor: Pending, unrename: Sequence[tuple[str, str]]) -> Pending:
    name = tensor.entry.name
    for ours, theirs in unrename:
        name = name.replace(ours, theirs)
    return replace(tensor, entry=replace(tensor.entry, name=name))


def _entry(name: str, fmt: Format, shape: tuple[int, ...]) -> Entry:
    nbytes = fmt.nbytes((math.prod(shape[:-1]), shape[-1]))
    return Entry(name, DTYPE_OF_FORMAT[fmt.name], shape, nbytes)


def _expert_tensors(
    layer: ExpertLayer, spelling: str
) -> Iterator[tuple[str, tuple[int, ...], list[tuple[int, int]]]]:
    """Name, shape and (expert, part) contents of each tensor of a layer's experts."""
    ffn, hidden, experts = layer.intermediate_size, layer.hidden_size, range(layer.num_experts)
    if spelling == "fused":
        gate_up = [(expert, part) for expert in experts for part in (0, 1)]
        yield f"{layer.prefix}.gate_up_proj", (len(experts), 2 * ffn, hidden), gate_up
        down = [(expert, 2) for expert in experts]
        yield f"{layer.prefix}.down_proj", (len(experts), hidden, ffn), down
        return
    for expert in experts:
        for part, tail in enumerate(_TAILS[spelling]):
            shape = (hidden, ffn) if part == 2 else (ffn, hidden)
            yield f"{layer.prefix}.{expert}.{tail}", shape, [(expert, part)]
