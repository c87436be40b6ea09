"""Makes a store and everything below it."""

from __future__ import annotations

from collections.abc import Sequence

from colibri.checkpoint.experts import ExpertIndex
from colibri.kernels.library import Library
from colibri.memory.arena import Arena
from colibri.memory.eviction import LRU
from colibri.memory.expert_store import ExpertStore
from colibri.memory.files import OpenFiles
from colibri.memory.jobs import Reader
from colibri.memory.native_reader import NativeReader
from colibri.memory.reader import ThreadReader
from colibri.memory.slot_classes import slot_classes


def open_store(
    index: ExpertIndex,
    counts: Sequence[int],
    *,
    library: Library | None = None,
    num_threads: int = 4,
) -> ExpertStore:
    """A store with `counts[c]` slots of each of `slot_classes(index)`, as `divide` gives them.

    Args:
        index: where the records are.
        counts: slots of each class.
        library: what `kernels.library.load()` returned; without it, Python threads read.
        num_threads: reads in flight.

    Raises:
        BudgetError: the system refuses the memory.
        ReadError: a file cannot be opened, or no thread started.
    """
    arena = Arena([found.slot_nbytes for found in slot_classes(index)], counts)
    reader = open_reader(index, arena, library, num_threads)
    return ExpertStore(index, arena, LRU(index.file.shape[0] * index.file.shape[1]), reader)


def open_reader(
    index: ExpertIndex, arena: Arena, library: Library | None, num_threads: int
) -> Reader:
    """The library's reader where there is a library; raises ReadError."""
    files = OpenFiles(index.files)
    try:
        if library is None:
            return ThreadReader(arena, files, num_threads)
        return NativeReader(library, arena, files, index.file.shape[2], num_threads)
    except BaseException:
        files.close()
        raise
