"""Experts addressed as (layer, expert), whatever their spelling on disk.

A record is one expert: one to three pieces, each a contiguous range of a file, which together hold
its gate, up and down part. The index is columnar (arrays over layer, expert, piece), because a
checkpoint may have half a million tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.rename import Census
from colibri.checkpoint.spellings import ExpertLayer, Piece, part_shape, take_pieces
from colibri.formats import padded
from colibri.kernels.api import ExpertPart

__all__ = ["PAGE", "ExpertIndex", "ExpertLayer", "ExpertLayerLayout", "Read", "index_experts"]

PAGE = 4096  # alignment of direct reads and of slots
_PARTS: tuple[Literal["gate_proj"], Literal["up_proj"], Literal["down_proj"]] = (
    "gate_proj",
    "up_proj",
    "down_proj",
)


class Read(NamedTuple):
    """One piece of a record.

    Attributes:
        file: index into `ExpertIndex.files`.
        offset: its first byte in the file; need not be aligned.
        nbytes: its bytes.
        region: where in the slot the page that holds its first byte goes; a direct read takes the
            enclosing pages.
    """

    file: int
    offset: int
    nbytes: int
    region: int


@dataclass(frozen=True, slots=True)
class ExpertLayerLayout:
    """What the records of one MoE layer have in common.

    Part i starts in its slot at `regions[part_pieces[i]] + (file offset of that piece) % PAGE +
    part_deltas[i]`.

    Attributes:
        layer: the layer's number in the model.
        num_experts: E.
        parts: gate, up and down.
        regions: slot offset of each piece's region.
        slot_nbytes: resident bytes of a record with the slack of its regions, whole pages.
        part_pieces: the piece that holds each part.
        part_deltas: where in its piece each part starts.
        record_nbytes: useful bytes of a record, the ones that `bytes_read` counts.
    """

    layer: int
    num_experts: int
    parts: tuple[ExpertPart, ExpertPart, ExpertPart]
    regions: tuple[int, ...]
    slot_nbytes: int
    part_pieces: tuple[int, int, int]
    part_deltas: tuple[int, int, int]
    record_nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertIndex:
    """Where every record lies; M MoE layers, at most E experts of at most P pieces.

    Attributes:
        layers: by ascending position.
        position: from a layer's number in the model to its index in `layers`.
        files: the files that hold records.
        file: `[M, E, P]` index into `files`, -1 where a layer has fewer experts or pieces.
        offset: `[M, E, P]` first byte in the file.
        nbytes: `[M, E, P]` bytes, 0 where there is no such piece.
        crc: `[M, E]` CRC-32C of each record, or None where the checkpoint has none.
    """

    layers: tuple[ExpertLayerLayout, ...]
    position: dict[int, int]
    files: tuple[Path, ...]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc: NDArray[np.uint32] | None = None

    def reads(self, layer: int, expert: int) -> list[Read]:
        """The pieces to read for one record; `layer` is the number in the model.

        Raises:
            KeyError: the layer has no routed experts.
            IndexError: the layer has no such expert.
        """
        row, layout = self._find(layer, expert)
        columns = (self.file[row], self.offset[row], self.nbytes[row])
        file, offset, nbytes = (column.tolist() for column in columns)
        return list(map(Read, file, offset, nbytes, layout.regions))

    def part_offsets(self, layer: int, expert: int) -> tuple[int, int, int]:
        """Where gate, up and down of one record start in its slot; errors as for `reads`."""
        row, layout = self._find(layer, expert)
        slack: list[int] = (self.offset[row] % PAGE).tolist()
        gate, up, down = (
            layout.regions[piece] + slack[piece] + delta
            for piece, delta in zip(layout.part_pieces, layout.part_deltas, strict=True)
        )
        return gate, up, down

    def _find(self, layer: int, expert: int) -> tuple[tuple[int, int], ExpertLayerLayout]:
        position = self.position[layer]
        layout = self.layers[position]
        if not 0 <= expert < layout.num_experts:
            raise IndexError(f"layer {layer} has {layout.num_experts} experts, no expert {expert}")
        return (position, expert), layout


def index_experts(census: Census, requests: Sequence[ExpertLayer]) -> ExpertIndex:
    """Take the experts of every requested layer out of the census and index them.

    Raises:
        IncompleteModelError: tensors are missing; gives found and expected counts.
        CheckpointError: two spellings in one layer, or a wrong shape.
        UnsupportedModelError: a dtype or an orientation that is not read.
    """
    taken = [take_pieces(census, request) for request in requests]
    shape = (
        len(requests),
        max((request.num_experts for request in requests), default=0),
        max(map(len, taken), default=0),
    )
    numbers: dict[Path, int] = {}
    file, offset = np.full(shape, -1, np.int32), np.zeros(shape, np.int64)
    nbytes = np.zeros(shape, np.int64)
    for row, (request, pieces) in enumerate(zip(requests, taken, strict=True)):
        for column, piece in enumerate(pieces):
            cell = (row, slice(0, request.num_experts), column)
            file[cell] = [numbers.setdefault(spec.file, len(numbers)) for spec in piece.specs]
            offset[cell] = _offsets(piece, request.num_experts)
            nbytes[cell] = _nbytes(piece)
    layers = tuple(map(_layout, requests, taken))
    position = {request.layer: row for row, request in enumerate(requests)}
    return ExpertIndex(layers, position, tuple(numbers), file, offset, nbytes)


def _nbytes(piece: Piece) -> int:
    return piece.format.nbytes((piece.rows, piece.columns))


def _offsets(piece: Piece, num_experts: int) -> NDArray[np.int64]:
    """First byte of every expert's piece, `[E]`."""
    offsets = np.array([spec.offset for spec in piece.specs], np.int64)
    if len(offsets) == num_experts:
        return offsets
    return offsets + np.arange(num_experts) * _nbytes(piece)  # one tensor holds them all


def _layout(request: ExpertLayer, pieces: Sequence[Piece]) -> ExpertLayerLayout:
    """Regions in the order of pieces, each with a page of slack: pieces start anywhere."""
    regions, end = [], 0
    homes: dict[int, tuple[int, int, ExpertPart]] = {}
    for number, piece in enumerate(pieces):
        regions.append(end)
        end += padded(_nbytes(piece), PAGE) + PAGE
        delta = 0
        for part in piece.parts:
            rows, columns = part_shape(request, part)
            stride = piece.format.panel_nbytes(columns)
            found = ExpertPart(_PARTS[part], piece.format, rows, columns, stride)
            homes[part] = (number, delta, found)
            delta += piece.format.nbytes((rows, columns))
    gate, up, down = homes[0], homes[1], homes[2]
    return ExpertLayerLayout(
        layer=request.layer,
        num_experts=request.num_experts,
        parts=(gate[2], up[2], down[2]),
        regions=tuple(regions),
        slot_nbytes=end,
        part_pieces=(gate[0], up[0], down[0]),
        part_deltas=(gate[1], up[1], down[1]),
        record_nbytes=sum(map(_nbytes, pieces)),
    )
