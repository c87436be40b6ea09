"""Makes partial mirrors: which records go on another drive, and how they get there.

Nothing is ever deleted, and no record that the receipt lists is written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.experts import PAGE, ExpertIndex
from colibri.errors import CheckpointError
from colibri.formats import Bytes
from colibri.memory.heat import Counts
from colibri.memory.mirror import open_mirror, read_pieces, record_crc, record_pieces
from colibri.memory.receipt import RECEIPT, Receipt
from colibri.memory.system import drop_cached

StageProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """What staging would do.

    Attributes:
        records: `[n]` numbers of the records to copy, hottest first.
        nbytes: bytes that they take on the drive.
        num_present: records that are there already.
        num_records: records of the model.
        free_bytes: what the drive has free.
        heat_share: of all uses known, the share of those that the mirror will hold; None where
            nothing is known.
    """

    records: NDArray[np.int64]
    nbytes: int
    num_present: int
    num_records: int
    free_bytes: int
    heat_share: float | None


def plan_stage(
    index: ExpertIndex, directory: Path, heat: Counts | None, budget: int | None, reserve: int
) -> StagePlan:
    """Choose records by heat `[M, E]`; of equal heat, the lower expert id of every layer first.

    Args:
        index: of the model.
        directory: of the mirror; it need not exist yet.
        heat: uses of each expert; None or all 0 where nothing is known.
        budget: bytes that all records on the mirror may take; None for what is free.
        reserve: bytes that stay free on its drive.

    Raises:
        CheckpointError: the directory holds something else, or a mirror of another model.
    """
    receipt = _receipt(directory, index)
    sizes = _drive_bytes(index)
    exists = sizes > 0
    ranked = _ranked(index, heat)
    free = _free_bytes(directory)
    room = free - reserve
    if budget is not None:
        room = min(room, budget - int(sizes[receipt.present].sum()))
    candidates = ranked[exists[ranked] & ~receipt.present[ranked]]
    ends = np.cumsum(sizes[candidates])
    chosen = candidates[: int(np.searchsorted(ends, max(room, 0), side="right"))]
    held = receipt.present.copy()
    held[chosen] = True
    uses = np.zeros(len(sizes)) if heat is None else heat.reshape(-1)
    return StagePlan(
        records=chosen,
        nbytes=int(sizes[chosen].sum()),
        num_present=int(receipt.present.sum()),
        num_records=int(exists.sum()),
        free_bytes=free,
        heat_share=float(uses[held].sum() / uses.sum()) if uses.any() else None,
    )


def stage(
    index: ExpertIndex, directory: Path, plan: StagePlan, progress: StageProgress | None = None
) -> None:
    """Copy the planned records; a run that is stopped leaves a mirror as good as before.

    Raises:
        CheckpointError: a file cannot be read or written, or the model's own record is damaged.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        receipt = _receipt(directory, index)
        receipt.write(directory, index)  # from here on the directory is known as a mirror
        crcs, present = receipt.crcs.copy(), receipt.present.copy()
        done, total = 0, len(plan.records)
        with _SparseFiles(directory, index.files) as files:
            for record in np.sort(plan.records).tolist():
                crcs[record] = _copy(index, record, files)
                present[record] = True
                done += 1
                if progress is not None:
                    progress(done * plan.nbytes // total, plan.nbytes)
            files.finish()
        replace(receipt, present=present, crcs=crcs).write(directory, index)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: cannot be written: {error.strerror}"
        ) from None


def verify_mirror(
    index: ExpertIndex, directory: Path, progress: StageProgress | None = None
) -> tuple[int, int]:
    """Read every record of a mirror; returns how many there are and their bytes.

    They are compared with the checksums of the model or the receipt, else with the model itself.

    Raises:
        CheckpointError: it is no mirror of this model, or records are damaged; says how many.
    """
    mirror = open_mirror(directory, index)
    own = None if index.crc is None else index.crc.reshape(-1)
    known = mirror.crcs if mirror.crcs is not None else own
    copies = [directory / path.name for path in index.files]
    records = np.flatnonzero(mirror.present).tolist()
    bad: list[int] = []
    for done, record in enumerate(records, 1):
        wanted = record_crc(index, record, index.files) if known is None else int(known[record])
        if record_crc(index, record, copies) != wanted:
            bad.append(record)
        if progress is not None:
            progress(done, len(records))
    if bad:
        row, expert = divmod(bad[0], index.file.shape[1])
        raise CheckpointError(
            f"mirror {directory}: {len(bad)} of {len(records)} records are damaged, the first is "
            f"expert {expert} of layer {index.layers[row].layer}: check the drive, then make the "
            "mirror again in an empty directory"
        )
    return len(records), int(index.nbytes.sum(axis=2).reshape(-1)[records].sum())


def _copy(index: ExpertIndex, record: int, files: _SparseFiles) -> int:
    """Copy one record; returns its checksum, which must be the model's own where it has one."""
    pieces = list(read_pieces(index, record, index.files))
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    crc = crc32c(whole)
    row, expert = divmod(record, index.file.shape[1])
    if index.crc is not None and crc != int(index.crc[row, expert]):
        raise CheckpointError(
            f"{index.files[index.file[row, expert, 0]]}: expert {expert} of layer "
            f"{index.layers[row].layer} does not match its checksum: run `coli verify --deep`"
        )
    for (file, offset, _), data in zip(record_pieces(index, record), pieces, strict=True):
        files.write(file, offset, data)
    return crc


class _SparseFiles:
    """Files of a mirror, with the names and lengths of the model's; new ones are named last."""

    def __init__(self, directory: Path, originals: Sequence[Path]) -> None:
        self._directory, self._originals = directory, originals
        self._handles: dict[int, int] = {}

    def write(self, number: int, offset: int, data: Bytes) -> None:
        """Put bytes where they stand in the model's file."""
        handle = self._handles.get(number)
        if handle is None:
            handle = self._handles[number] = self._open(number)
        done = 0
        while done < data.size:
            done += os.pwrite(handle, data[done:].data, offset + done)

    def _open(self, number: int) -> int:
        path = self._path(number)
        target = path if path.exists() else _beside(path)
        handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(handle, self._originals[number].stat().st_size)
        return handle

    def _path(self, number: int) -> Path:
        return self._directory / self._originals[number].name

    def finish(self) -> None:
        """Make everything safe on the drive, and give new files their names."""
        for number, handle in self._handles.items():
            os.fsync(handle)
            drop_cached(handle, 0, 0)
            if _beside(self._path(number)).exists():
                _beside(self._path(number)).replace(self._path(number))

    def __enter__(self) -> _SparseFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.staging")


def _receipt(directory: Path, index: ExpertIndex) -> Receipt:
    """The mirror's receipt, or an empty one where there is nothing yet."""
    if (directory / RECEIPT).exists():
        return Receipt.read(directory, index)
    for path in index.files:
        if (directory / path.name).exists():
            raise CheckpointError(
                f"{directory}: holds {path.name} and no {RECEIPT}, so it is no partial mirror: "
                "name an empty directory, or use it as a whole mirror"
            )
    return Receipt.empty(index)


def _ranked(index: ExpertIndex, heat: Counts | None) -> NDArray[np.int64]:
    """Numbers of all records, hottest first; of equal heat by expert, then by layer."""
    layers, experts = index.file.shape[:2]
    row, expert = np.divmod(np.arange(layers * experts), experts)
    uses = np.zeros(layers * experts) if heat is None else heat.reshape(-1)
    return np.lexsort((row, expert, -uses)).astype(np.int64)


def _drive_bytes(index: ExpertIndex) -> NDArray[np.int64]:
    """Bytes `[M * E]` of the whole pages around each record's pieces."""
    pages = -(-(index.offset + index.nbytes) // PAGE) - index.offset // PAGE
    found: NDArray[np.int64] = np.where(index.nbytes > 0, pages * PAGE, 0).sum(axis=2).reshape(-1)
    return found


def _free_bytes(directory: Path) -> int:
    """What its drive has free; the directory itself need not exist."""
    near = directory.absolute()
    while not near.exists():
        near = near.parent
    return shutil.disk_usage(near).free
