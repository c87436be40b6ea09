"""Small checkpoints of known bytes: real files and the index over them."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.experts import PAGE, ExpertIndex, ExpertLayerLayout
from colibri.checkpoint.record import RecordLayout
from colibri.formats import F32, Bytes, Format, padded
from colibri.kernels.api import ExpertPart
from colibri.kernels.library import Library, load, unavailable_reason

KINDS = ["threads"] if unavailable_reason() else ["threads", "native"]
HIDDEN, WIDTH = 40, 24
SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


@dataclass(frozen=True)
class Records:
    """An index and what each record must look like in its slot.

    Attributes:
        index: over the files.
        parts: resident bytes of (layer row, expert), gate, up and down; a part of a container is
            interleaved with others, so there the whole record stands instead.
    """

    index: ExpertIndex
    parts: dict[tuple[int, int], list[Bytes]]

    @property
    def record_nbytes(self) -> int:
        return self.index.layers[0].record_nbytes


def library(kind: str) -> Library | None:
    return load() if kind == "native" else None


def pieces_model(
    folder: Path, num_layers: int = 2, num_experts: int = 6, fmt: Format = F32, shift: int = 13
) -> Records:
    """Hub style: three pieces a record, gate and up in one file, down in another, unaligned."""
    rng = np.random.default_rng(3)
    layouts = tuple(_pieces_layout(layer, num_experts, fmt) for layer in range(num_layers))
    shape = (num_layers, num_experts, 3)
    file, offset = np.zeros(shape, np.int32), np.zeros(shape, np.int64)
    nbytes = np.zeros(shape, np.int64)
    parts: dict[tuple[int, int], list[Bytes]] = {}
    bodies = [bytearray(b"x" * shift), bytearray(b"y" * (shift + 3))]
    for cell in np.ndindex(num_layers, num_experts):
        parts[cell] = [_matrix(rng, fmt, part) for part in SHAPES]
        for piece, data in enumerate(parts[cell]):
            body = bodies[piece // 2]
            file[*cell, piece], offset[*cell, piece] = piece // 2, len(body)
            nbytes[*cell, piece] = data.size
            body += data.tobytes()
    files = tuple(folder / f"shard-{i}.bin" for i in range(2))
    for path, body in zip(files, bodies, strict=True):
        path.write_bytes(body)
    position = {layout.layer: row for row, layout in enumerate(layouts)}
    return Records(ExpertIndex(layouts, position, files, file, offset, nbytes), parts)


def container_model(
    folder: Path, fmt: Format, num_layers: int = 1, num_experts: int = 4
) -> Records:
    """Container style: one aligned piece a record, with checksums."""
    rng = np.random.default_rng(5)
    record = RecordLayout.uniform(fmt, HIDDEN, WIDTH)
    shape = (num_layers, num_experts, 1)
    offset = np.zeros(shape, np.int64)
    offset[..., 0] = PAGE + np.arange(num_experts) * record.nbytes
    crc = np.zeros(shape[:2], np.uint32)
    file = np.broadcast_to(np.arange(num_layers, dtype=np.int32)[:, None, None], shape).copy()
    layouts, files, parts = [], [], {}
    for row in range(num_layers):
        layouts.append(
            ExpertLayerLayout(
                layer=3 * row + 1,
                num_experts=num_experts,
                parts=record.parts,
                regions=(0,),
                slot_nbytes=record.nbytes,
                part_pieces=(0, 0, 0),
                part_deltas=record.offsets,
                record_nbytes=record.nbytes,
            )
        )
        files.append(folder / f"experts-{row}.bin")
        body = bytearray(PAGE)
        for expert in range(num_experts):
            data = record.assemble(*(_matrix(rng, fmt, part) for part in SHAPES))
            parts[row, expert] = [data]
            crc[row, expert] = crc32c(data)
            body += data.tobytes()
        files[-1].write_bytes(body)
    position = {layout.layer: row for row, layout in enumerate(layouts)}
    nbytes = np.full(shape, record.nbytes, np.int64)
    index = ExpertIndex(tuple(layouts), position, tuple(files), file, offset, nbytes, crc)
    return Records(index, parts)


def bare_index(sizes: list[int], num_experts: int) -> ExpertIndex:
    """An index without files: one layer for each record size in pages."""
    shape = (len(sizes), num_experts, 1)
    layouts = tuple(
        replace(
            _pieces_layout(layer, num_experts, F32),
            regions=(0,),
            part_pieces=(0, 0, 0),
            part_deltas=(0, 0, 0),
            slot_nbytes=pages * PAGE,
            record_nbytes=pages * PAGE,
        )
        for layer, pages in enumerate(sizes)
    )
    nbytes = np.broadcast_to(np.array(sizes)[:, None, None] * PAGE, shape).astype(np.int64)
    offset: NDArray[np.int64] = np.cumsum(nbytes).reshape(shape)
    position = {layer: layer for layer in range(len(sizes))}
    files = (Path("nowhere.bin"),)
    return ExpertIndex(layouts, position, files, np.zeros(shape, np.int32), offset, nbytes)


def _matrix(rng: np.random.Generator, fmt: Format, shape: tuple[int, int]) -> Bytes:
    return fmt.pack(fmt.encode(rng.standard_normal(shape, np.float32)), shape)


def _pieces_layout(layer: int, num_experts: int, fmt: Format) -> ExpertLayerLayout:
    sizes = [padded(fmt.nbytes(shape), PAGE) + PAGE for shape in SHAPES]
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        ExpertPart(name, fmt, shape[0], shape[1], fmt.panel_nbytes(shape[1]))
        for name, shape in zip(names, SHAPES, strict=True)
    )
    return ExpertLayerLayout(
        layer=layer,
        num_experts=num_experts,
        parts=(gate, up, down),
        regions=(0, sizes[0], sizes[0] + sizes[1]),
        slot_nbytes=sum(sizes),
        part_pieces=(0, 1, 2),
        part_deltas=(0, 0, 0),
        record_nbytes=sum(fmt.nbytes(shape) for shape in SHAPES),
    )
