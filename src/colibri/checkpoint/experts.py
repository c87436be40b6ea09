"""Experts addressed as (layer, expert), whatever their spelling on disk.

A record is one expert: one to three pieces, each a contiguous range of a file, which together hold
its gate, up and down part. The index is columnar (arrays over layer, expert, piece), because a
checkpoint may have half a million tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.coding import encoding, require_exact
from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.record import PAGE, RecordLayout
from colibri.checkpoint.rename import Census
from colibri.checkpoint.spellings import (
    ExpertLayer,
    LayerSources,
    PartSource,
    Piece,
    part_shape,
    take_sources,
)
from colibri.checkpoint.storage import packings
from colibri.formats import Format, IntegerFormat, Shape, padded
from colibri.formats.packing import Packing, PackKind
from colibri.kernels.api import ExpertPart

__all__ = ["PAGE", "ExpertIndex", "ExpertLayer", "ExpertLayerLayout", "Read", "index_experts"]

_PLAIN = Quantization()
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
    part_deltas[i]`, or at `part_deltas[i]` where its piece is -1: it is packed.

    Attributes:
        layer: the layer's number in the model.
        num_experts: E.
        parts: gate, up and down.
        regions: slot offset of each piece's region.
        slot_nbytes: resident bytes of a record with the slack of its regions, whole pages.
        part_pieces: the piece that holds each part.
        part_deltas: where in its piece each part starts.
        record_nbytes: useful bytes of a record, the ones that `bytes_read` counts.
        staged: for each piece, whether it is read into a staging buffer, where its region counts
            from; () where none is.
        staging_nbytes: bytes of a staging buffer.
        packings: how the record becomes resident when all pieces are there.
        biases: where in the slot the float32 biases of gate, up and down are, where it has any.
    """

    layer: int
    num_experts: int
    parts: tuple[ExpertPart, ExpertPart, ExpertPart]
    regions: tuple[int, ...]
    slot_nbytes: int
    part_pieces: tuple[int, int, int]
    part_deltas: tuple[int, int, int]
    record_nbytes: int
    staged: tuple[bool, ...] = ()
    staging_nbytes: int = 0
    packings: tuple[Packing, ...] = ()
    biases: tuple[int, int, int] | None = None


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
            delta if piece < 0 else layout.regions[piece] + slack[piece] + delta
            for piece, delta in zip(layout.part_pieces, layout.part_deltas, strict=True)
        )
        return gate, up, down

    def _find(self, layer: int, expert: int) -> tuple[tuple[int, int], ExpertLayerLayout]:
        position = self.position[layer]
        layout = self.layers[position]
        if not 0 <= expert < layout.num_experts:
            raise IndexError(f"layer {layer} has {layout.num_experts} experts, no expert {expert}")
        return (position, expert), layout


def index_experts(
    census: Census,
    requests: Sequence[ExpertLayer],
    quantization: Quantization = _PLAIN,
    coded: IntegerFormat | None = None,
) -> ExpertIndex:
    """Take the experts of every requested layer out of the census and index them.

    They are rounded to `coded` as they land, where that is given.

    Raises:
        IncompleteModelError: tensors are missing; gives found and expected counts.
        CheckpointError: two spellings in one layer, or a wrong shape.
        UnsupportedModelError: a dtype or an orientation that is not read, or codes that would be
            rounded again.
    """
    taken = [take_sources(census, request, quantization) for request in requests]
    shape = (
        len(requests),
        max((request.num_experts for request in requests), default=0),
        max((len(found.pieces) for found in taken), default=0),
    )
    numbers: dict[Path, int] = {}
    file, offset = np.full(shape, -1, np.int32), np.zeros(shape, np.int64)
    nbytes = np.zeros(shape, np.int64)
    for row, (request, found) in enumerate(zip(requests, taken, strict=True)):
        for column, piece in enumerate(found.pieces):
            cell = (row, slice(0, request.num_experts), column)
            file[cell] = [numbers.setdefault(spec.file, len(numbers)) for spec in piece.specs]
            offset[cell] = _offsets(piece, request.num_experts)
            nbytes[cell] = piece.nbytes
    pairs = zip(requests, taken, strict=True)
    layers = tuple(layout_of(request, found, coded) for request, found in pairs)
    position = {request.layer: row for row, request in enumerate(requests)}
    return ExpertIndex(layers, position, tuple(numbers), file, offset, nbytes)


def _offsets(piece: Piece, num_experts: int) -> NDArray[np.int64]:
    """First byte of every expert's piece, `[E]`."""
    offsets = np.array([spec.offset for spec in piece.specs], np.int64)
    if len(offsets) == num_experts:
        return offsets
    return offsets + np.arange(num_experts) * piece.nbytes  # one tensor holds them all


def layout_of(
    request: ExpertLayer, found: LayerSources, coded: IntegerFormat | None = None
) -> ExpertLayerLayout:
    """Direct where every part can be read to its place, else packed out of a staging buffer.

    Raises:
        UnsupportedModelError: codes would be rounded again to `coded`.
    """
    formats = [_format(request, found, number, coded) for number in range(3)]
    direct = not request.biased and all(
        source.is_direct and formats[number] is source.storage.format
        for number, source in found.parts.items()
    )
    return _direct(request, found) if direct else _packed(request, found, formats)


def _format(
    request: ExpertLayer, found: LayerSources, number: int, coded: IntegerFormat | None
) -> Format:
    """The format in which a part is resident."""
    stored = found.parts[number].storage.format
    if coded is None:
        return stored
    require_exact(stored, coded, f"layer {request.layer}: {_PARTS[number]}")
    return coded


def _direct(request: ExpertLayer, found: LayerSources) -> ExpertLayerLayout:
    """Regions in the order of pieces, each with a page of slack: pieces start anywhere.

    Scales are staged, and follow their codes in the slot once these are there.
    """
    homes = {source.codes.piece: 0 for source in found.parts.values()}
    parts: list[ExpertPart] = []
    steps: list[Packing] = []
    for number in range(3):
        source, shape = found.parts[number], part_shape(request, number)
        fmt = source.storage.format
        homes[source.codes.piece] += fmt.resident_nbytes(shape)
        parts.append(ExpertPart(_PARTS[number], fmt, *shape, fmt.panel_nbytes(shape[1])))
        where = (source.storage, shape, source.codes, source.scales)
        steps += packings(*where, part=number, resident=True)
    regions, end, staging = [], 0, 0
    for number, piece in enumerate(found.pieces):
        if number in homes:
            regions.append(end)
            end += padded(homes[number], PAGE) + PAGE
        else:
            regions.append(staging)
            staging += padded(piece.nbytes, PAGE) + PAGE
    sources = [found.parts[number] for number in range(3)]
    staged = tuple(number not in homes for number in range(len(found.pieces)))
    return ExpertLayerLayout(
        layer=request.layer,
        num_experts=request.num_experts,
        parts=(parts[0], parts[1], parts[2]),
        regions=tuple(regions),
        slot_nbytes=end,
        part_pieces=_three(sources, lambda source: source.codes.piece),
        part_deltas=_three(sources, lambda source: source.codes.start),
        record_nbytes=sum(piece.nbytes for piece in found.pieces),
        staged=staged if any(staged) else (),
        staging_nbytes=staging,
        packings=tuple(steps),
    )


def _packed(
    request: ExpertLayer, found: LayerSources, formats: Sequence[Format]
) -> ExpertLayerLayout:
    """All pieces are staged; a slot is laid out as a record of a container."""
    sources = [found.parts[number] for number in range(3)]
    shapes = [part_shape(request, number) for number in range(3)]
    record = RecordLayout.of(
        (formats[0], formats[1], formats[2]),
        (shapes[0], shapes[1], shapes[2]),
        biased=request.biased,
    )
    steps: list[Packing] = []
    for number, (source, part) in enumerate(zip(sources, record.parts, strict=True)):
        where = (source.storage, shapes[number], source.codes, source.scales)
        stride = part.panel_stride
        if isinstance(part.format, IntegerFormat) and part.format is not source.storage.format:
            steps.append(encoding(*where, part.format, part=number, stride=stride))
        else:
            steps += packings(*where, part=number, stride=stride)
    steps += _bias_steps(sources, shapes, record)
    regions, staging = [], 0
    for piece in found.pieces:
        regions.append(staging)
        staging += padded(piece.nbytes, PAGE) + PAGE
    return ExpertLayerLayout(
        layer=request.layer,
        num_experts=request.num_experts,
        parts=record.parts,
        regions=tuple(regions),
        slot_nbytes=record.nbytes,
        part_pieces=(-1, -1, -1),
        part_deltas=record.offsets,
        record_nbytes=sum(piece.nbytes for piece in found.pieces),
        staged=(True,) * len(found.pieces),
        staging_nbytes=staging,
        packings=tuple(steps),
        biases=record.biases,
    )


def _bias_steps(
    sources: Sequence[PartSource], shapes: Sequence[Shape], record: RecordLayout
) -> Iterator[Packing]:
    """Biases become float32."""
    places = zip(record.biases or (), sources, shapes, strict=bool(record.biases))
    for number, (place, source, shape) in enumerate(places):
        assert source.bias is not None
        yield Packing(PackKind.FLOATS, number, True, place, 1, shape[0], source.bias)


def _three(sources: Sequence[PartSource], of: Callable[[PartSource], int]) -> tuple[int, int, int]:
    gate, up, down = map(of, sources)
    return gate, up, down
