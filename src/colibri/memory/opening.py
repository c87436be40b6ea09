"""Makes a store and everything below it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.kernels.library import Library
from colibri.memory.arena import Arena, staging_nbytes
from colibri.memory.devices import Reading, device_key, remember, remembered
from colibri.memory.drives import Drives, Mirror
from colibri.memory.expert_store import ExpertStore
from colibri.memory.jobs import Reader, TimedReader
from colibri.memory.measuring import LEAST_MODEL, Measurement, on_drive
from colibri.memory.mirror import open_mirrors
from colibri.memory.native_reader import NativeReader
from colibri.memory.numa import find_placement, place
from colibri.memory.other_load import OtherLoad
from colibri.memory.policies import make_policy
from colibri.memory.reader import ThreadReader
from colibri.memory.reader_config import ReaderConfig
from colibri.memory.slot_classes import slot_classes
from colibri.memory.traced import TracedReader
from colibri.spans import Spans

_DEFAULT = ReaderConfig()
_MOST_OTHERS = 0.2  # of the processors, while a drive is measured
_log = logging.getLogger(__name__)
_FIRST = np.zeros(1, np.int64)


def open_store(
    index: ExpertIndex,
    counts: Sequence[int],
    *,
    library: Library | None = None,
    num_threads: int | None = None,
    reader: ReaderConfig = _DEFAULT,
    eviction: str = "mixed",
    active: int = 1,
    heat: NDArray[np.float64] | None = None,
    spans: Spans | None = None,
) -> ExpertStore:
    """A store with `counts[c]` slots of each of `slot_classes(index)`, as `divide` gives them.

    Args:
        index: where the records are.
        counts: slots of each class.
        library: what `kernels.library.load()` returned; without it, Python threads read.
        num_threads: reads in flight, in place of what `reader` says.
        reader: how records are read, and from where.
        eviction: one of `policies.EVICTIONS`.
        active: experts that serve one token in one layer.
        heat: uses `[L, E]` of earlier runs, from which the policy starts.
        spans: where reads are written down, if they are.

    Raises:
        BudgetError: the system refuses the memory.
        ReadError: a file cannot be opened, or no thread started.
        SettingsError, CheckpointError: a mirror that is none of this model.
    """
    if not reader.verify:
        index = replace(index, crc=None)
    mirrors = open_mirrors(reader.mirrors, index)
    biased = any(layout.biases is not None for layout in index.layers)
    sizes = [found.slot_nbytes for found in slot_classes(index)]
    arena = Arena(sizes, counts, staging_nbytes(index), biased)
    rows = [found.layers for found in slot_classes(index)]
    num_layers, num_experts, _ = index.file.shape
    policy = make_policy(eviction, (num_layers, num_experts), active, rows, counts, heat)
    place(arena.data, find_placement(), library)
    readings = find_readings(index, arena, mirrors, library, reader)
    drives = Drives(
        index,
        mirrors,
        direct=[found.direct for found in readings],
        weights=_weights(readings),
        keep_cache=readings[0].keep_cache,
    )
    threads = num_threads or reader.threads or min(64, sum(found.threads for found in readings))
    block = readings[0].block if reader.block is None else reader.block
    opened: Reader = (timed := open_reader(index, arena, library, drives, threads, block))
    if spans is not None:
        opened = TracedReader(timed, arena, index, spans)
    arena.touch_ahead(library)  # after the drives were measured
    return ExpertStore(index, arena, policy, opened, active)


def find_readings(
    index: ExpertIndex,
    arena: Arena,
    mirrors: Sequence[Mirror],
    library: Library | None,
    config: ReaderConfig,
) -> list[Reading]:
    """How each drive is read: as remembered, else as measured now, in slots of `arena`.

    Nothing is measured without a place to remember it, nor for models that are small. While others
    are busy, a drive is read in the default way, and measured again next time.
    """
    everything = np.flatnonzero((index.file >= 0).any(axis=2))
    places = [(index, everything)]
    places += [(on_drive(index, m.directory), np.flatnonzero(m.present)) for m in mirrors]

    def make(drives: Drives, threads: int, block: int) -> Reader:
        return open_reader(index, arena, library, drives, threads, block)

    readings = []
    for where, records in places:
        reading = known_reading(where, config.cache, records)
        if reading is None and config.cache is not None and is_measurable(where) and len(records):
            load = OtherLoad()
            reading = Measurement(where, arena, make, records).find(Reading())
            if is_trusted(load.share()):
                remember(config.cache, reading_key(where, records), reading)
            else:
                reading = Reading(bytes_per_s=reading.bytes_per_s)
        readings.append(reading or Reading())
    return readings


def known_reading(
    index: ExpertIndex, cache: Path | None, records: NDArray[np.integer] = _FIRST
) -> Reading | None:
    """How the drive that holds `records` is read, if that was measured; raises OSError."""
    if cache is None or not is_measurable(index) or not len(records):
        return None
    return remembered(cache, reading_key(index, records))


def is_trusted(others: float | None) -> bool:
    """Whether a measurement counts, others having taken that much of the processors."""
    if others is None or others <= _MOST_OTHERS:
        return True
    _log.info("how the drive is read best will be measured again: other programs were busy")
    return False


def is_measurable(index: ExpertIndex) -> bool:
    """Whether there is enough to read."""
    return int(index.nbytes.sum()) >= LEAST_MODEL


def reading_key(index: ExpertIndex, records: NDArray[np.integer]) -> str:
    """Names the drive that holds `records` and the size of their pieces."""
    file = index.file.reshape(-1, index.file.shape[2])[records[0], 0]
    return device_key(index.files[file], int(index.nbytes.max()))


def _weights(readings: Sequence[Reading]) -> list[int]:
    """Bandwidths, or all the same where one is not known."""
    speeds = [found.bytes_per_s for found in readings]
    return speeds if all(speeds) else [1] * len(speeds)


def open_reader(
    index: ExpertIndex,
    arena: Arena,
    library: Library | None,
    drives: Drives,
    num_threads: int,
    block: int = 0,
) -> TimedReader:
    """The library's reader where there is a library; it owns `drives`. Raises ReadError."""
    try:
        if library is None:
            return ThreadReader(arena, drives, num_threads)
        return NativeReader(library, arena, drives, index.file.shape[2], num_threads, block)
    except BaseException:
        drives.close()
        raise
