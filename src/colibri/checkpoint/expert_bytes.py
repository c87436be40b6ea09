"""Reads one expert whole, for conversion and tests; the engine streams them (`memory`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from colibri.checkpoint.experts import PAGE, ExpertIndex, ExpertLayerLayout
from colibri.checkpoint.record import RecordLayout
from colibri.errors import CheckpointError, IncompleteModelError, NumericsError
from colibri.formats import Bytes
from colibri.kernels.packing import pack


def read_expert(index: ExpertIndex, layer: ExpertLayerLayout, expert: int) -> tuple[Bytes, ...]:
    """Gate, up and down of one expert as resident bytes, then their biases if it has any.

    Raises:
        IncompleteModelError: a file has become shorter.
        CheckpointError: a file cannot be read.
    """
    slot, staging = np.empty(layer.slot_nbytes, np.uint8), np.empty(layer.staging_nbytes, np.uint8)
    offsets, pieces = index.part_offsets(layer.layer, expert), []
    for number, read in enumerate(index.reads(layer.layer, expert)):
        memory = staging if layer.staged and layer.staged[number] else slot
        page = read.offset % PAGE
        pieces.append(memory[read.region + page : read.region + page + read.nbytes])
        if read.nbytes:
            _read_into(index.files[read.file], read.offset, pieces[-1])
    for step in layer.packings:
        start = step.to + (0 if step.in_slot else offsets[step.part])
        if not pack(step, pieces, slot[start:]):
            raise NumericsError(
                f"expert {expert} of layer {layer.layer}: {layer.parts[step.part].name} holds a"
                " scale or bias that is not finite; fetch the checkpoint again"
            )
    return RecordLayout(layer.parts, offsets, layer.slot_nbytes, layer.biases).split(slot)


def _read_into(path: Path, offset: int, into: Bytes) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < into.nbytes and (count := file.readinto(into[done:].data)):
                done += count
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read at byte {offset}: {error.strerror}"
        ) from None
    if done < into.nbytes:
        raise IncompleteModelError(
            f"{path}: wanted {into.nbytes} bytes at {offset}, found {done}; it changed meanwhile"
        )
