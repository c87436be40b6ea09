"""Opens mirrors: validates at start what they hold.

A mirror is either whole (every file that holds experts, and `colibri.json` of a container) or
partial, made by `coli mirror stage`. Nothing is ever written to one while a model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.container_manifest import MANIFEST
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import CheckpointError, SettingsError
from colibri.formats import Bytes
from colibri.memory.drives import MAX_DRIVES, Mirror
from colibri.memory.receipt import RECEIPT, Receipt, edges_digest

_SAMPLES = 4  # records that are compared where nothing else tells one model from another


def open_mirrors(directories: Sequence[Path], index: ExpertIndex) -> list[Mirror]:
    """Validate mirrors of the model that `index` is of.

    Raises:
        SettingsError: no directory, one named twice or too many, or the model's own.
        CheckpointError: a copy that is not of this model, or not whole and without a receipt.
    """
    if len(directories) >= MAX_DRIVES:
        raise SettingsError(
            f"mirror: {len(directories)} are named; at most {MAX_DRIVES - 1} can be"
        )
    own = index.files[0].parent if index.files else None
    for number, directory in enumerate(directories):
        if not directory.is_dir():
            raise SettingsError(f"mirror {directory}: there is no such directory")
        for other in (*directories[:number], *([own] if own else [])):
            if directory.samefile(other):
                raise SettingsError(f"mirror {directory}: is {other}, which is read already")
    return [open_mirror(directory, index) for directory in directories]


def open_mirror(directory: Path, index: ExpertIndex) -> Mirror:
    """Validate one mirror; raises CheckpointError."""
    if (directory / RECEIPT).exists():
        return _partial(directory, index)
    return _whole(directory, index)


def _partial(directory: Path, index: ExpertIndex) -> Mirror:
    receipt = Receipt.read(directory, index)
    files = index.file.reshape(len(receipt.present), -1)[receipt.present]
    for number in np.unique(files[files >= 0]).tolist():
        _check_length(directory, index.files[number])
    if index.crc is not None:
        wrong = receipt.present & (receipt.crcs != index.crc.reshape(-1))
        if wrong.any():
            raise CheckpointError(
                f"{directory / RECEIPT}: its checksums are not those of the model: stage the "
                "mirror again, in an empty directory"
            )
    else:
        _compare_checksums(directory, index, receipt)
    return Mirror(directory, receipt.present, receipt.crcs)


def _compare_checksums(directory: Path, index: ExpertIndex, receipt: Receipt) -> None:
    """Whether the model's records are still those that were copied, by a few of them."""
    for record in _spread(np.flatnonzero(receipt.present)):
        if record_crc(index, int(record), index.files) != receipt.crcs[record]:
            raise CheckpointError(
                f"{directory / RECEIPT}: the model's weights are not those that were copied: stage "
                "the mirror again, in an empty directory"
            )


def _whole(directory: Path, index: ExpertIndex) -> Mirror:
    for path in index.files:
        if not (directory / path.name).exists():
            raise CheckpointError(
                f"mirror {directory}: {path.name} is missing and there is no {RECEIPT}: copy every "
                "file, or let `coli mirror stage` make a partial mirror"
            )
        _check_length(directory, path)
        if edges_digest(path) != edges_digest(directory / path.name):
            raise CheckpointError(f"mirror {directory}: {path.name} is not that of {path.parent}")
    size = index.file.shape[0] * index.file.shape[1]
    present = (index.file[:, :, 0] >= 0).reshape(size)
    copies = [directory / path.name for path in index.files]
    if index.crc is not None and not _same(directory / MANIFEST, index.files[0].parent / MANIFEST):
        raise CheckpointError(f"mirror {directory}: {MANIFEST} is not that of the model")
    for record in _spread(np.flatnonzero(present)) if index.crc is None else []:
        if record_crc(index, int(record), copies) != record_crc(index, int(record), index.files):
            raise CheckpointError(f"mirror {directory}: holds other weights than the model")
    return Mirror(directory, present)


def _same(copy: Path, original: Path) -> bool:
    """Whether two small files are equal, or both absent."""
    if not original.exists():
        return not copy.exists()
    return copy.exists() and copy.read_bytes() == original.read_bytes()


def _spread(records: NDArray[np.intp]) -> NDArray[np.intp]:
    """A few of them, evenly."""
    n = min(_SAMPLES, len(records))
    chosen: NDArray[np.intp] = records[np.linspace(0, len(records) - 1, n).astype(int)]
    return chosen


def _check_length(directory: Path, original: Path) -> None:
    copy, wanted = directory / original.name, original.stat().st_size
    if not copy.is_file():
        raise CheckpointError(f"mirror {directory}: {copy.name} is missing: stage the mirror again")
    if copy.stat().st_size != wanted:
        raise CheckpointError(
            f"mirror {directory}: {copy.name} has {copy.stat().st_size} bytes, the model's has "
            f"{wanted}: copy it again"
        )


def record_pieces(index: ExpertIndex, record: int) -> list[tuple[int, int, int]]:
    """File, offset and bytes of each piece of a record."""
    row, expert = divmod(record, index.file.shape[1])
    columns = (index.file, index.offset, index.nbytes)
    pieces = zip(*(column[row, expert].tolist() for column in columns), strict=True)
    return [piece for piece in pieces if piece[2]]


def read_pieces(index: ExpertIndex, record: int, files: Sequence[Path]) -> Iterator[Bytes]:
    """Bytes of each piece of a record, from copies of the model's files.

    Raises:
        CheckpointError: a file cannot be read, or ends too early.
    """
    for number, offset, nbytes in record_pieces(index, record):
        try:
            with files[number].open("rb", buffering=0) as file:
                file.seek(offset)
                data = np.empty(nbytes, np.uint8)
                done = 0
                while done < nbytes and (got := file.readinto(data[done:].data)):
                    done += got
        except OSError as error:
            raise CheckpointError(
                f"{files[number]}, byte {offset}: cannot be read: {error.strerror}"
            ) from None
        if done < nbytes:
            raise CheckpointError(f"{files[number]}: ends before byte {offset + nbytes}")
        yield data


def record_crc(index: ExpertIndex, record: int, files: Sequence[Path]) -> int:
    """CRC-32C over the pieces of a record; raises CheckpointError."""
    pieces = list(read_pieces(index, record, files))
    return crc32c(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
