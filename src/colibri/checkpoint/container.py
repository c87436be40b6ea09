"""The Colibri container: a checkpoint converted so that one expert is one aligned read.

A container is a directory of plain safetensors files whose data starts at a multiple of 4096:

* `experts-LLLLL.safetensors` holds one MoE layer: tensors `experts.<layer>.<expert>` by ascending
  id and nothing else; each is a record as `record` describes it, in the bytes that kernels read.
* `dense-NNNNN.safetensors` hold everything else under its Hugging Face name: floats as they are,
  coded matrices as resident bytes, and `crc32c.<layer>`, the checksums of the records.
* `colibri.json` (`container_manifest`) says how all of that is coded; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.container_checks import check_files, read_dense, read_records
from colibri.checkpoint.container_manifest import (
    MANIFEST,
    PROGRESS,
    Dense,
    Manifest,
    layer_file,
)
from colibri.checkpoint.experts import ExpertIndex, ExpertLayer, ExpertLayerLayout, layout_of
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.spellings import LayerSources, PartSource, Piece
from colibri.checkpoint.storage import Storage
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.formats import FloatFormat, Format, FP8Format, IntegerFormat, Shape
from colibri.formats.packing import ITEM_F32, Items, item_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """An opened container; its headers agree with its manifest.

    Attributes:
        directory: where it lies.
        manifest: what `colibri.json` says.
        records: of each MoE layer, the tensors of its experts by ascending id.
        checksums: of each MoE layer, the tensor of CRC-32C `[E]`.
    """

    directory: Path
    manifest: Manifest
    records: Mapping[int, Sequence[TensorSpec]]
    checksums: Mapping[int, TensorSpec]

    @property
    def family(self) -> str:
        """The model_type that was converted."""
        return self.manifest.family

    @property
    def dense(self) -> Mapping[str, Dense]:
        """Format and shape of every dense tensor."""
        return self.manifest.dense

    @property
    def coded(self) -> dict[str, tuple[Format, Shape]]:
        """Format and shape of the dense matrices that are stored as resident bytes."""
        return {
            name: (fmt, (shape[0], shape[1]))
            for name, (fmt, shape) in self.manifest.dense.items()
            if not fmt.is_plain
        }

    def expert_index(
        self,
        requests: Sequence[ExpertLayer],
        coded: IntegerFormat | None = None,
        num_layers: int | None = None,
    ) -> ExpertIndex:
        """Index the experts that a model needs: one piece each, on whole pages, without slack.

        Floats are rounded to `coded` as they land, where that is given. Layers from number
        `num_layers` on are those of drafting heads, which need not be asked for.

        Raises:
            IncompleteModelError: a layer or some of its experts are not there.
            CheckpointError: a layer too many, or matrices of another shape.
            UnsupportedModelError: codes would be rounded again.
        """
        for request in requests:
            self._check_request(request)
        left = sorted(self.manifest.layouts.keys() - {request.layer for request in requests})
        if left and (num_layers is None or left[0] < num_layers):
            raise self._broken(f"experts of layer {left[0]}, which config.json knows as dense")
        experts = max((request.num_experts for request in requests), default=0)
        shape = (len(requests), experts, 1)
        file, offset = np.full(shape, -1, np.int32), np.zeros(shape, np.int64)
        nbytes, crc = np.zeros(shape, np.int64), np.zeros(shape[:2], np.uint32)
        for row, request in enumerate(requests):
            cell = (row, slice(0, request.num_experts))
            file[cell] = row
            offset[cell] = [[spec.offset] for spec in self.records[request.layer]]
            nbytes[cell] = self.manifest.layouts[request.layer].nbytes
            crc[cell] = self.read_checksums(request.layer)
        return ExpertIndex(
            layers=tuple(self._layout(request, coded) for request in requests),
            position={request.layer: row for row, request in enumerate(requests)},
            files=tuple(self.directory / layer_file(request.layer) for request in requests),
            file=file,
            offset=offset,
            nbytes=nbytes,
            crc=crc,
        )

    def read_checksums(self, layer: int) -> NDArray[np.uint32]:
        """CRC-32C `[E]` of a layer's records."""
        return read_tensor(self.checksums[layer]).view("<u4").astype(np.uint32)

    def _check_request(self, request: ExpertLayer) -> None:
        found = self.manifest.num_experts.get(request.layer, 0)
        if found < request.num_experts:
            raise IncompleteModelError(
                f"{self.directory / MANIFEST}: found {found} of {request.num_experts} experts of"
                f" layer {request.layer}; convert the model again"
            )
        wide = (request.intermediate_size, request.hidden_size)
        wanted = (wide, wide, (request.hidden_size, request.intermediate_size))
        layout = self.manifest.layouts[request.layer]
        parts = layout.parts
        if (layout.biases is not None) != request.biased:
            has, wants = ("no ", "some") if request.biased else ("", "none")
            raise self._broken(
                f"{has}biases of experts in layer {request.layer}, config.json wants {wants}"
            )
        shapes = tuple((part.rows, part.columns) for part in parts)
        if (found, shapes) != (request.num_experts, wanted):
            raise self._broken(
                f"{found} experts {list(shapes)} in layer {request.layer}, config.json wants"
                f" {request.num_experts} {list(wanted)}"
            )

    def _layout(self, request: ExpertLayer, coded: IntegerFormat | None) -> ExpertLayerLayout:
        record = self.manifest.layouts[request.layer]
        if coded is not None and any(part.format is not coded for part in record.parts):
            return layout_of(request, self._sources(request, record), coded)
        return ExpertLayerLayout(
            layer=request.layer,
            num_experts=request.num_experts,
            parts=record.parts,
            regions=(0,),
            slot_nbytes=record.nbytes,
            part_pieces=(0, 0, 0),
            part_deltas=record.offsets,
            record_nbytes=record.nbytes,
            biases=record.biases,
        )

    def _sources(self, request: ExpertLayer, record: RecordLayout) -> LayerSources:
        """Parts that are all floats or fp8, as `experts` reads those of other checkpoints."""
        parts = {}
        for number, (part, offset) in enumerate(zip(record.parts, record.offsets, strict=True)):
            fmt, shape = part.format, (part.rows, part.columns)
            if not isinstance(fmt, FloatFormat | FP8Format):
                raise UnsupportedModelError(
                    f"{self.directory / MANIFEST}: {part.name} of layer {request.layer} is"
                    f" {fmt.name}, and codes are not rounded again: convert the original"
                    " checkpoint, or leave `experts` out"
                )
            storage = Storage.of_resident(fmt)
            row, size = storage.row_nbytes(part.columns), item_nbytes(storage.item)
            scales = None
            if isinstance(fmt, FP8Format):
                line = storage.blocks(*shape)[1] * storage.scale_nbytes
                scales = storage.scale_items(0, offset + fmt.scales_at(shape), line)
            items = Items(0, storage.item, offset, row, size)
            at = record.biases
            bias = None if at is None else Items(0, ITEM_F32, at[number], 0, 4)
            parts[number] = PartSource(storage, items, scales, bias, in_rows=True, shares=True)
        return LayerSources([Piece([*self.records[request.layer]], record.nbytes)], parts)

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / MANIFEST}: has {what}; config.json is not that of these weights"
        )


def open_container(directory: Path) -> Container | None:
    """Open the container in a directory; None where there is no `colibri.json`.

    Headers and sizes are checked; contents only by `verify.verify_container`.

    Raises:
        CheckpointError: the manifest is broken, or a file contradicts it.
        IncompleteModelError: files are missing or cut, or a conversion was not finished.
        UnsupportedModelError: written by a later release.
    """
    if not (directory / MANIFEST).exists():
        if (directory / PROGRESS).exists():
            raise IncompleteModelError(
                f"{directory}: a conversion that was not finished: run its `coli convert …` again, "
                "or remove the directory"
            )
        return None
    manifest = Manifest.read(directory / MANIFEST)
    check_files(directory, manifest)
    records = {
        layer: read_records(directory / layer_file(layer), layer, experts, manifest.layouts[layer])
        for layer, experts in manifest.num_experts.items()
    }
    return Container(directory, manifest, records, read_dense(directory, manifest))
