"""`coli verify`: whether a model's files are whole."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from colibri.cli.options import JSON, MODEL_ARGUMENT, with_model
from colibri.cli.progress import Reporter
from colibri.llm.location import find_model
from colibri.settings import Settings
from colibri.units import format_bytes

if TYPE_CHECKING:
    from colibri.checkpoint.verify import Verified


@with_model
def verify(path: MODEL_ARGUMENT = None, *, as_object: JSON = False, settings: Settings) -> None:
    """Check every file of a model: names, shapes and sizes, and contents where checksums exist."""
    directory = find_model(settings)
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.checkpoint.index import Checkpoint
        from colibri.checkpoint.verify import Verified, verify_container
        from colibri.models.description import Description
        from colibri.text import Tokenizer

        reporter(f"checking {directory}", 0, 1)
        checkpoint = Checkpoint.open(directory)
        Description.of(checkpoint)
        Tokenizer.load(directory)  # it has no checksum: what can be told is whether it is usable
        if checkpoint.container is None:
            files = {spec.file for spec in checkpoint.tensors.values()}
            found = Verified(len(files), sum(file.stat().st_size for file in files), 0)
        else:
            found = verify_container(
                checkpoint.container,
                lambda done, total: reporter(f"checking {directory}", done, total),
            )
    if as_object:
        facts = {"model": str(directory), "files": found.num_files, "bytes": found.nbytes}
        print(json.dumps({**facts, "records": found.num_records, "ok": True}))
    else:
        print(f"{directory}: {summary(found, checkpoint.container is not None)}", file=sys.stderr)


def summary(found: Verified, is_container: bool) -> str:
    """What was checked, and what could not be."""
    files = f"{found.num_files} files, {format_bytes(found.nbytes)}"
    if is_container:
        return f"{files}: every SHA-256 and the checksums of {found.num_records} experts agree"
    return (
        f"{files}: headers, names, shapes and sizes agree; contents were not checked, "
        "because a plain checkpoint has no checksums"
    )
