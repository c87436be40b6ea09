"""Rewrites a checkpoint as a container, one expert in memory at a time.

Which tensors are experts and which are dense is known to families, above this layer; here both come
ready indexed. What is coded already moves unchanged: codes and scales are never rounded twice.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from colibri.checkpoint.coding import require_exact
from colibri.checkpoint.container_writer import (
    ContainerWriter,
    LayerWriter,
    require_directory,
    require_free,
)
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import ExpertIndex, ExpertLayerLayout
from colibri.checkpoint.hub.names import title
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.storage import StoredMatrix
from colibri.errors import CheckpointError, NumericsError
from colibri.formats import Bytes, Format, Shape

_COMPANIONS = (
    *("tokenizer*", "chat_template*", "generation_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("LICENSE*", "NOTICE*"),
)


@dataclass(frozen=True, slots=True)
class DenseParameter:
    """One dense tensor to be rewritten.

    Attributes:
        name: its name in the container.
        shape: as the model sees it.
        spec: where it is now.
        stored: the format of its bytes there.
        format: the format it gets.
        matrix: its codes and scales, where its bytes there are not resident ones.
    """

    name: str
    shape: tuple[int, ...]
    spec: TensorSpec
    stored: Format
    format: Format
    matrix: StoredMatrix | None = None

    def read(self) -> Bytes:
        """Its resident bytes in the format in which it is stored."""
        if self.matrix is None:
            return read_tensor(self.spec)
        out = np.empty(self.stored.resident_nbytes(_matrix(self.shape)), np.uint8)
        self.matrix.read(out)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the container."""
        return self.format.resident_nbytes(_matrix(self.shape))


@dataclass(frozen=True, slots=True)
class ConvertProgress:
    """How far a conversion is.

    Attributes:
        what: what is being written: `layer 3`, `dense`.
        done_bytes: bytes of the container that are written, or were kept.
        total_bytes: bytes it will have, without headers.
    """

    what: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        directory: the container.
        num_layers: MoE layers in it.
        num_kept_layers: those that an earlier, interrupted run had finished.
        source_bytes: bytes of the files that hold the source's tensors, with their headers.
        total_bytes: the same of the container.
        elapsed_s: the time of this run.
        left_aside: tensors of the source that are not in the container, counted by part.
    """

    directory: Path
    num_layers: int
    num_kept_layers: int
    source_bytes: int
    total_bytes: int
    elapsed_s: float
    left_aside: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times smaller it became."""
        return self.source_bytes / max(self.total_bytes, 1)


def convert(
    checkpoint: Checkpoint,
    index: ExpertIndex,
    dense: Sequence[DenseParameter],
    destination: Path,
    *,
    family: str,
    experts: Format | None,
    down: Format | None = None,
    left_aside: Mapping[str, int] | None = None,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> ConvertReport:
    """Write `checkpoint` to `destination` as a container.

    Args:
        checkpoint: what is converted.
        index: its routed experts.
        dense: everything else.
        destination: empty, missing, or left by an interrupted conversion of the same source.
        family: the model_type of the configuration.
        experts: the format that experts get; None keeps theirs.
        down: the format of their down_proj, where it should be another; rounding costs most there.
        left_aside: what is not converted, for the report.
        progress: told after every expert.

    Raises:
        CheckpointError: `destination` holds something else, is not apart from the source, or
            cannot be written to, or its disk is too small.
        UnsupportedModelError: experts or dense tensors are coded in another format than they
            get, and that is not f32; nothing is written.
        NumericsError: a weight is not finite.
    """
    began = time.monotonic()
    _require_apart(checkpoint.directory, destination)
    require_directory(destination)
    layouts = [_target(layer, experts, down or experts) for layer in index.layers]
    for parameter in dense:  # they are written last, hours later perhaps
        require_exact(parameter.stored, parameter.format, parameter.name)
    job = _Job(index, layouts, dense, progress)
    about = {
        "name": title(checkpoint.directory),
        "experts": experts.name if experts else "as stored",
        **({} if down is None else {"down": down.name}),
        "dense": ", ".join(sorted({parameter.format.name for parameter in dense})),
    }
    require_free(destination, job.total_bytes)
    with ContainerWriter(
        destination, family=family, source=about, revision=_fingerprint(checkpoint)
    ) as writer:
        kept = job.run(writer)
        writer.finish(checkpoint.config, companions(checkpoint.directory))
    return ConvertReport(
        directory=destination,
        num_layers=len(layouts),
        num_kept_layers=kept,
        source_bytes=sum(path.stat().st_size for path in _files(checkpoint)),
        total_bytes=sum(path.stat().st_size for path in destination.glob("*.safetensors")),
        elapsed_s=time.monotonic() - began,
        left_aside=left_aside or {},
    )


def _require_apart(source: Path, destination: Path) -> None:
    """Refuse to write where the source is, before anything advises to remove what is there."""
    old, new = source.resolve(), destination.resolve()
    name_another = "name a directory apart from it for the container"
    if old == new:
        raise CheckpointError(
            f"{destination}: source and destination are the same directory: {name_another}"
        )
    if old in new.parents:
        raise CheckpointError(f"{destination}: is inside the source {source}: {name_another}")
    if new in old.parents:
        raise CheckpointError(f"{destination}: holds the source {source}: {name_another}")


def companions(directory: Path) -> list[Path]:
    """The files that belong to a model beside its weights and config.json."""
    found = {path for pattern in _COMPANIONS for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


@dataclass(slots=True)
class _Job:
    """One conversion on its way."""

    index: ExpertIndex
    layouts: Sequence[RecordLayout]
    dense: Sequence[DenseParameter]
    progress: Callable[[ConvertProgress], None] | None
    done_bytes: int = 0
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.index.layers, self.layouts, strict=True)
        records = sum(layer.num_experts * layout.nbytes for layer, layout in pairs)
        self.total_bytes = records + sum(parameter.nbytes for parameter in self.dense)

    def run(self, writer: ContainerWriter) -> int:
        """Write layer by layer, then dense tensors; returns the number of layers that were kept."""
        kept = 0
        for layer, layout in zip(self.index.layers, self.layouts, strict=True):
            what = f"layer {layer.layer}"
            if writer.has_layer(layer.layer, layer.num_experts, layout):
                kept += 1
                self._advance(what, layer.num_experts * layout.nbytes)
                continue
            with writer.layer(layer.layer, layer.num_experts, layout) as out:
                self._write_layer(out, layer, layout)
        for parameter in self.dense:
            if not writer.has_dense(parameter.name):
                data = parameter.read()
                shape = _matrix(parameter.shape)
                recoded = _recode(data, parameter.stored, parameter.format, shape, parameter.name)
                writer.dense_resident(parameter.name, recoded, parameter.format, parameter.shape)
            self._advance("dense", parameter.nbytes)
        return kept

    def _write_layer(
        self, out: LayerWriter, layer: ExpertLayerLayout, layout: RecordLayout
    ) -> None:
        with ThreadPoolExecutor(len(layout.parts)) as pool:  # NumPy computes without the GIL
            for expert in range(layer.num_experts):
                where = f"layer {layer.layer}, expert {expert}, "
                gate, up, down, *biases = read_expert(self.index, layer, expert)
                tasks = [
                    pool.submit(_recode, data, old.format, new.format, shape, where + old.name)
                    for old, new, data in zip(
                        layer.parts, layout.parts, (gate, up, down), strict=True
                    )
                    if (shape := (old.rows, old.columns))
                ]
                out.add_resident(expert, *(task.result() for task in tasks), *biases)
                self._advance(f"layer {layer.layer}", layout.nbytes)

    def _advance(self, what: str, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self.progress is not None:
            self.progress(ConvertProgress(what, self.done_bytes, self.total_bytes))


def _target(layer: ExpertLayerLayout, experts: Format | None, down: Format | None) -> RecordLayout:
    """How a layer is laid out in the container."""
    wanted = zip(layer.parts, (experts, experts, down), strict=True)
    gate, up, last = (fmt or part.format for part, fmt in wanted)
    for part, fmt in zip(layer.parts, (gate, up, last), strict=True):
        require_exact(part.format, fmt, f"layer {layer.layer}: {part.name}")
    shapes = [(part.rows, part.columns) for part in layer.parts]
    biased = layer.biases is not None
    return RecordLayout.of((gate, up, last), (shapes[0], shapes[1], shapes[2]), biased=biased)


def _recode(data: Bytes, old: Format, new: Format, shape: Shape, what: str) -> Bytes:
    """Resident bytes in another format; the same bytes where it is the same."""
    if old is new:
        return data
    require_exact(old, new, what)
    try:
        return new.pack(new.encode(old.decode(data, shape)), shape)
    except NumericsError as error:
        raise NumericsError(f"{what}: {error}") from None


def _matrix(shape: tuple[int, ...]) -> Shape:
    """A vector is one row."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold its tensors."""
    files = {spec.file for spec in checkpoint.tensors.values()}
    if checkpoint.container is not None:
        files |= {checkpoint.directory / name for name in checkpoint.container.manifest.files}
    return sorted(files)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Names, sizes and times of the files that are read: whether a source is still the same."""
    digest = hashlib.sha256(repr(sorted(checkpoint.config.items(), key=str)).encode())
    for path in _files(checkpoint):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
