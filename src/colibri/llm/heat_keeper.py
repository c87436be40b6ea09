"""Carries heat from one run to the next: warm start, and a file saved after every answer."""

from __future__ import annotations

import threading
import zlib

from colibri.memory.expert_store import ExpertStore
from colibri.memory.usage import Usage
from colibri.models.description import Description


def open_usage(description: Description) -> Usage:
    """The heat file of a checkpoint."""
    experts = description.experts
    return Usage(
        description.checkpoint.directory,
        _identity(description),
        [layout.layer for layout in experts.layers],
        experts.file.shape[1],
    )


def _identity(description: Description) -> str:
    """A name for the model that stays when its folder moves, and changes when its files do."""
    config = (description.checkpoint.directory / "config.json").read_bytes()
    sizes = sorted((path.name, path.stat().st_size) for path in description.experts.files)
    family = description.blueprint.family.model_type
    return f"{family} {zlib.crc32(repr(sizes).encode(), zlib.crc32(config)):08x}"


class HeatKeeper:
    """Saves what a store counts."""

    def __init__(self, usage: Usage, store: ExpertStore) -> None:
        self._usage, self._store = usage, store
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
