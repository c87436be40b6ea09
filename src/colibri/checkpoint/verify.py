"""Holds the files of a model against the checksums that are known of them; each is read once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri.checkpoint.container import Container
from colibri.checkpoint.container_manifest import layer_file
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.hub.digest import digest_of
from colibri.checkpoint.hub.names import cached_name
from colibri.checkpoint.hub.place import Origin
from colibri.checkpoint.hub.repository import HubFile
from colibri.checkpoint.safetensors import read_header
from colibri.errors import CheckpointError
from colibri.formats import Bytes

_PIECE_BYTES = 4 << 20
_MOST_TOLD = 20


Mend = Callable[[Sequence[str]], str]


def mend_by_hand(names: Sequence[str]) -> str:
    """What to do about damaged files of which nobody knows where they came from."""
    return "fetch it again or convert again" if len(names) == 1 else "fetch them or convert again"


def mend_by_pull(origin: Origin, directory: Path) -> Mend:
    """Fetches damaged files again."""
    pulled = f"coli pull {origin.name.repo}@{origin.commit}"
    where = "" if cached_name(directory) is not None else f" --dir {directory}"

    def mend(names: Sequence[str]) -> str:
        chosen = "".join(f" --include '{name}'" for name in names)
        return f"repair: `{pulled}{where}{chosen} --force`"

    return mend


def mend_by_conversion(source: Mapping[str, str], directory: Path) -> Mend:
    """Makes damaged parts of a container anew."""
    return lambda _: f"repair: `coli convert {source.get('name', 'SRC')} {directory} --repair`"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read and found to agree.

    Attributes:
        num_files: safetensors files.
        nbytes: bytes in them.
        num_records: experts whose checksum was compared.
    """

    num_files: int
    nbytes: int
    num_records: int


def verify_container(
    container: Container,
    progress: Callable[[int, int], None] | None = None,
    mend: Mend = mend_by_hand,
) -> Verified:
    """Compare each file's SHA-256 and each record's CRC-32C with what was written.

    Args:
        container: an opened container, whose sizes and headers agree already.
        progress: told bytes done and bytes in all.
        mend: the command that repairs files of these names.

    Raises:
        CheckpointError: names the files, and where there are the experts, that are damaged, and
            what repairs them.
    """
    damages: list[str] = []
    broken: dict[str, None] = {}
    files = container.manifest.files
    layers = {layer_file(layer): layer for layer in container.records}
    done, total = 0, sum(record.nbytes for record in files.values())
    for name, wanted in files.items():
        known = len(damages)
        digest = hashlib.sha256()
        for piece in (
            _checked(container, layers[name], damages)
            if name in layers
            else _plain(container.directory / name)
        ):
            digest.update(piece.data)
            done += piece.nbytes
            if progress is not None:
                progress(done, total)
        if digest.hexdigest() != wanted.sha256 and len(damages) == known:
            damages.append(
                f"{container.directory / name}: wanted SHA-256 {wanted.sha256}, found"
                f" {digest.hexdigest()}"
            )
        if len(damages) > known:
            broken[name] = None
    if damages:
        raise CheckpointError(_told(damages, mend([*broken])))
    records = sum(len(records) for records in container.records.values())
    return Verified(len(files), total, records)


def verify_pulled(
    directory: Path,
    origin: Origin,
    deep: bool,
    progress: Callable[[int, int], None] | None = None,
    mend: Mend = mend_by_hand,
) -> Verified:
    """Hold what came from the hub against sizes, headers and, where `deep`, digests.

    Raises:
        CheckpointError: names the files that are missing or damaged, and what repairs them.
    """
    found: dict[str, str] = {}
    paths = [directory / name for name in origin.files]
    done, total = 0, sum(path.stat().st_size for path in paths if path.is_file())

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for name, file in origin.files.items():
        if damage := _damage(directory / name, file, advance if deep else None):
            found[name] = f"{directory / name}: {damage}"
    if found:
        raise CheckpointError(_told([*found.values()], mend([*found])))
    return Verified(len(origin.files), total, 0)


def _damage(path: Path, file: HubFile, advance: Callable[[int], None] | None) -> str:
    """What is wrong with a file; nothing where it is as it should be."""
    if not path.is_file():
        return "is missing"
    if file.nbytes >= 0 and path.stat().st_size != file.nbytes:
        return f"wanted {file.nbytes} bytes, found {path.stat().st_size}"
    if advance is not None:
        digest = digest_of(path, file.digest.kind, advance)
        return "" if digest == file.digest else f"wanted {file.digest}, found {digest.value}"
    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except CheckpointError as error:
            return str(error).removeprefix(f"{path}: ")
    return ""


def _told(damages: list[str], mend: str) -> str:
    """One damage in a line; of several the first, below one another."""
    if len(damages) == 1:
        return f"{damages[0]}: the file is damaged; {mend}"
    more = len(damages) - _MOST_TOLD
    lines = [*damages[:_MOST_TOLD], *([f"and {more:,} more"] if more > 0 else [])]
    return "\n  ".join([f"{len(damages):,} damages; {mend}:", *lines])


def _plain(path: Path) -> Iterator[Bytes]:
    """A file piece by piece."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield np.frombuffer(piece, np.uint8)


def _checked(container: Container, layer: int, damages: list[str]) -> Iterator[Bytes]:
    """A layer's file: its header, then record by record, each compared with its checksum."""
    path, specs = container.directory / layer_file(layer), container.records[layer]
    checksums = container.read_checksums(layer).tolist()
    with path.open("rb") as file:
        yield np.frombuffer(file.read(specs[0].offset), np.uint8)
        for expert, (spec, wanted) in enumerate(zip(specs, checksums, strict=True)):
            record = np.frombuffer(file.read(spec.nbytes), np.uint8)
            found = crc32c(record)
            if found != wanted:
                damages.append(
                    f"{path}: layer {layer}, expert {expert}: wanted CRC-32C {wanted:08x}, found"
                    f" {found:08x}"
                )
            yield record
