"""`coli verify`: whether a model's files are whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.options import JSON, MODEL_ARGUMENT, with_model
from colibri.cli.progress import Reporter
from colibri.llm.location import find_model
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from colibri.checkpoint.verify import Verified


DEEP = Annotated[
    bool,
    typer.Option("--deep", metavar="", help="Read everything and compare digests and checksums."),
]


@with_model
def verify(
    path: MODEL_ARGUMENT = None, *, deep: DEEP = False, as_object: JSON = False, settings: Settings
) -> None:
    """Check every file of a model: names, shapes and sizes; with --deep contents too.

    What is damaged is named, with the command that repairs it.
    """
    directory = find_model(settings)
    with Reporter() as reporter:
        reporter.opening(settings)
        stage = f"checking {directory}"
        reporter(stage, 0, 1)
        found, checked = _verify(directory, deep, lambda *counts: reporter(stage, *counts))
    if as_object:
        facts = {"model": str(directory), "files": found.num_files, "bytes": found.nbytes}
        deeply = {"records": found.num_records, "deep": bool(deep and checked), "ok": True}
        print(json.dumps({**facts, **deeply}))
    else:
        print(f"{directory}: {summary(found, deep, checked)}", file=sys.stderr)


def _verify(
    directory: Path, deep: bool, progress: Callable[[int, int], None]
) -> tuple[Verified, str]:
    """What was found to agree, and by what contents were or could be compared."""
    from colibri.checkpoint.hub.place import Origin
    from colibri.checkpoint.index import Checkpoint
    from colibri.checkpoint.verify import (
        Verified,
        mend_by_conversion,
        mend_by_pull,
        verify_container,
        verify_pulled,
    )
    from colibri.models.description import Description
    from colibri.text import Tokenizer

    origin = Origin.of(directory) if directory.is_dir() else None
    if origin is not None:  # before anything else is told of the same damage
        mend = mend_by_pull(origin, directory)
        pulled = verify_pulled(directory, origin, deep, progress, mend)
    checkpoint = Checkpoint.open(directory)
    Description.of(checkpoint)
    Tokenizer.load(directory)  # it has no checksum: what can be told is whether it is usable
    container = checkpoint.container
    if container is not None and (origin is None or not deep):
        mend = mend_by_conversion(container.manifest.source, directory) if origin is None else mend
        nbytes = sum(record.nbytes for record in container.manifest.files.values())
        whole = Verified(len(container.manifest.files), nbytes, 0)
        return (verify_container(container, progress, mend) if deep else whole), "SHA-256"
    if origin is not None:
        return pulled, "digest"
    files = {spec.file for spec in checkpoint.tensors.values()}
    return Verified(len(files), sum(file.stat().st_size for file in files), 0), ""


def summary(found: Verified, deep: bool, checked: str) -> str:
    """What was checked, and what could or could not be."""
    files = f"{found.num_files} files, {format_bytes(found.nbytes)}"
    if deep and checked:
        records = f" and the checksums of {found.num_records} experts" if found.num_records else ""
        return f"{files}: every {checked}{records} {'agree' if records else 'agrees'}"
    why = "--deep compares them" if checked else "a plain checkpoint has no checksums"
    return f"{files}: headers, names, shapes and sizes agree; contents were not checked: {why}"
