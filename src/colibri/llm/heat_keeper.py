"""Carries heat from one run to the next: warm start, and a file saved after every answer."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

from colibri.checkpoint.fingerprint import Place, fingerprint
from colibri.errors import CheckpointError
from colibri.memory.expert_store import ExpertStore
from colibri.memory.usage import Usage
from colibri.memory.verdicts import Verdicts
from colibri.models.description import Description


def open_usage(description: Description) -> Usage:
    """The heat file of a checkpoint; a GGUF file has its own, since folders may hold many."""
    experts = description.experts
    return Usage(
        description.checkpoint.directory,
        model_identity(description),
        [layout.layer for layout in experts.layers],
        experts.file.shape[1],
        suffix=_suffix(description),
    )


def open_verdicts(description: Description, num_slots: int) -> Verdicts:
    """What earlier runs with as many slots found out about reading ahead."""
    directory, identity = description.checkpoint.directory, model_identity(description)
    return Verdicts(directory, identity, num_slots, suffix=_suffix(description))


def _suffix(description: Description) -> str:
    gguf = description.checkpoint.gguf
    return "" if gguf is None else f".{gguf.path.stem}"


def model_identity(description: Description) -> str:
    """A name for the model that stays when its folder moves, and changes when its files do.

    Two fine-tunes whose files have equal sizes differ in it, see `fingerprint`.
    """
    checkpoint = description.checkpoint
    try:
        if checkpoint.gguf is None:
            config = (checkpoint.directory / "config.json").read_bytes()
        else:
            config = repr(sorted(checkpoint.config.items())).encode()
        sizes = sorted((file.name, file.stat().st_size) for file in description.experts.files)
        weights = fingerprint(_places(description))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: it was there a moment ago and cannot be read now "
            f"({error.strerror}): leave the model in place while it is opened"
        ) from None
    family = description.blueprint.family.model_type
    return f"{family} {zlib.crc32(repr(sizes).encode(), zlib.crc32(config)):08x}{weights:08x}"


def _places(description: Description) -> Iterator[Place]:
    """Every dense tensor, and the first and last record of every MoE layer."""
    for tensor in description.dense:
        yield tensor.spec.file, tensor.spec.offset, tensor.spec.nbytes
    experts = description.experts
    for layout in experts.layers:
        for expert in (0, layout.num_experts - 1):
            for read in experts.reads(layout.layer, expert):
                if read.nbytes:
                    yield experts.files[read.file], read.offset, read.nbytes


class HeatKeeper:
    """Saves what a store counts, and what was found out about reading ahead."""

    def __init__(self, usage: Usage, store: ExpertStore, verdicts: Verdicts | None = None) -> None:
        self._usage, self._store, self._verdicts = usage, store, verdicts
        self._lock = threading.Lock()  # answers of several threads may end together

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong with the file."""
        return tuple(self._usage.notes)

    def save(self) -> None:
        """Add what was used since the last time to the file."""
        with self._lock:
            uses = self._store.heat.taken()
            if uses.any():
                self._usage.add(uses)
            if self._verdicts is not None:
                self._verdicts.save()
