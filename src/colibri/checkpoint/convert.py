"""Rewrites a checkpoint as a container: several experts in memory at a time, one for each worker.

What is coded already moves unchanged: codes and scales are never rounded twice. The order of bytes
depends on nothing but the source, so that a conversion that was killed and goes on gives the same
files as one that was not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from colibri.checkpoint.container_writer import ContainerWriter, require_directory, require_free
from colibri.checkpoint.conversion import Conversion, companions, require_apart
from colibri.checkpoint.experts import ExpertLayerLayout
from colibri.checkpoint.recode import Record, expert_record
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.writing import write_errors
from colibri.errors import CheckpointError
from colibri.formats import Bytes
from colibri.kernels.cpus import num_threads

Item = TypeVar("Item")
_READING = 2  # workers more than CPUs: some wait for the disk
_MEMORY_BYTES = 640 << 20  # of all workers together; one is always allowed


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
    conversion: Conversion,
    destination: Path,
    *,
    progress: Callable[[ConvertProgress], None] | None = None,
    documents: Mapping[str, bytes] | None = None,
) -> ConvertReport:
    """Write the container.

    Args:
        conversion: what is to be done.
        destination: empty, missing, or left by an interrupted conversion of the same source.
        progress: told after every expert.
        documents: files to write beside the weights, by name: the tokenizer of a GGUF file, say.

    Raises:
        CheckpointError: `destination` holds something else, is not apart from the source, or
            cannot be written to, its disk is too small, or the source changed meanwhile.
        NumericsError: a weight is not finite.
        WriteError: the disk is full or fails.
    """
    began = time.monotonic()
    checkpoint = conversion.checkpoint
    require_apart(checkpoint.place, destination)
    require_directory(destination)
    require_free(destination, conversion.total_bytes)
    source_bytes, revision = conversion.source_bytes, conversion.fingerprint()
    with (
        write_errors(destination),
        ContainerWriter(
            destination, family=conversion.family, source=conversion.about, revision=revision
        ) as writer,
    ):
        kept = _Job(conversion, revision, progress).run(writer)
        files = () if checkpoint.gguf is not None else companions(checkpoint.directory)
        writer.finish(checkpoint.config, files, documents or {})
    return ConvertReport(
        directory=destination,
        num_layers=len(conversion.layouts),
        num_kept_layers=kept,
        source_bytes=source_bytes,
        total_bytes=sum(path.stat().st_size for path in destination.glob("*.safetensors")),
        elapsed_s=time.monotonic() - began,
        left_aside=conversion.left_aside,
    )


@dataclass(slots=True)
class _Job:
    """One conversion on its way."""

    conversion: Conversion
    revision: str
    progress: Callable[[ConvertProgress], None] | None
    done_bytes: int = 0
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_bytes = self.conversion.total_bytes

    def run(self, writer: ContainerWriter) -> int:
        """Write layer by layer, then dense tensors; returns the number of layers that were kept."""
        conversion = self.conversion
        pairs = list(zip(conversion.index.layers, conversion.layouts, strict=True))
        missing = [
            (layer, layout)
            for layer, layout in pairs
            if not writer.has_layer(layer.layer, layer.num_experts, layout)
        ]
        for layer, layout in pairs:
            if (layer, layout) not in missing:
                self._advance(f"layer {layer.layer}", layer.num_experts * layout.nbytes)
        with closing(in_order(self._records(missing), self._workers())) as records:
            for layer, layout in missing:
                with writer.layer(layer.layer, layer.num_experts, layout) as out:
                    for expert in range(layer.num_experts):
                        record = next(records)
                        out.add_record(expert, record.data, record.checksum)
                        self._advance(f"layer {layer.layer}", layout.nbytes)
                    self._require_unchanged()
        self._write_dense(writer)
        self._require_unchanged()
        return len(pairs) - len(missing)

    def _records(
        self, layers: Iterable[tuple[ExpertLayerLayout, RecordLayout]]
    ) -> Iterator[Callable[[], Record]]:
        conversion = self.conversion
        for layer, layout in layers:
            importance = conversion.importance.get(layer.layer)
            for expert in range(layer.num_experts):
                yield partial(expert_record, conversion.index, layer, layout, expert, importance)

    def _workers(self) -> int:
        """As many as there are CPUs, and a few that read, as far as memory goes."""
        pairs = zip(self.conversion.index.layers, self.conversion.layouts, strict=True)
        each = max(
            (x.slot_nbytes + x.staging_nbytes + 2 * layout.nbytes for x, layout in pairs), default=1
        )
        return max(1, min(num_threads() + _READING, _MEMORY_BYTES // each - 1))

    def _write_dense(self, writer: ContainerWriter) -> None:
        missing = [each for each in self.conversion.dense if not writer.has_dense(each.name)]
        for each in self.conversion.dense:
            if each not in missing:
                self._advance("dense", each.nbytes)
        tasks = (piece for each in missing for piece in each.pieces())
        with closing(in_order(tasks, num_threads() + _READING)) as found:
            for each in missing:
                pieces = self._followed(found, each.nbytes)
                writer.dense_pieces(each.name, pieces, each.nbytes, each.format, each.shape)

    def _followed(self, found: Iterator[Bytes], nbytes: int) -> Iterator[Bytes]:
        """The next pieces, of so many bytes."""
        left = nbytes
        while left > 0:
            piece = next(found)
            left -= piece.nbytes
            yield piece
            self._advance("dense", piece.nbytes)

    def _require_unchanged(self) -> None:
        if self.conversion.fingerprint() != self.revision:
            raise CheckpointError(
                f"{self.conversion.checkpoint.directory}: its files changed while they were "
                "converted: what was written is of no use; remove it and convert again when the "
                "source is as it should be"
            )

    def _advance(self, what: str, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self.progress is not None:
            self.progress(ConvertProgress(what, self.done_bytes, self.total_bytes))


def in_order(tasks: Iterable[Callable[[], Item]], workers: int) -> Generator[Item, None, None]:
    """The results of tasks, which several threads compute; one more than threads is under way."""
    waiting: deque[Future[Item]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
