"""What an evaluation has found so far, kept until it ends, so that one that was stopped goes on.

A file of JSON, one value a line: what is evaluated, then a line for each finished piece of work.
The last line may be cut short by a crash and is then done again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colibri.errors import SettingsError
from colibri.llm.archives import state_identity
from colibri.llm.loading import Prepared

VERSION = 1


def identity(prepared: Prepared, kind: str, what: str) -> dict[str, Any]:
    """All that decides what an evaluation finds: its kind and data, the model, what computes it."""
    return {"eval": VERSION, "kind": kind, "data": what, "model": state_identity(prepared)}


class Ledger:
    """Results of pieces of work, by number. Use it in a `with`; `finish` when all is told."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Go on where an evaluation of the same was stopped.

        Raises:
            SettingsError: nothing can be written there.
        """
        name = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=12)
        self.path = folder / f"{name.hexdigest()}.jsonl"
        self.found: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.found = self._resumed(dict(about))
            self._file = self.path.open("w", encoding="utf-8")
            self._write(dict(about), *self.found)
        except OSError as error:
            raise SettingsError(
                f"cache_dir: {error.filename or folder}: {error.strerror}: name a directory that "
                "can be written, where unfinished evaluations are kept"
            ) from None

    @property
    def num_resumed(self) -> int:
        """Pieces that an earlier run had finished, before any is added."""
        return len(self.found)

    def add(self, result: Mapping[str, Any]) -> None:
        """The next piece is done."""
        self.found.append(dict(result))
        self._write(self.found[-1])

    def truncate(self, count: int) -> None:
        """Forget all pieces but the first `count`."""
        if count < len(self.found):
            del self.found[count:]
            self._file.seek(0)
            about = json.loads(self.path.read_text(encoding="utf-8").splitlines()[0])
            self._file.truncate()
            self._write(about, *self.found)

    def finish(self) -> None:
        """All is told: nothing has to be kept."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Keep it for another run."""
        self._file.close()

    def _resumed(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        try:
            if json.loads(lines[0]) != about:
                return []
            return [json.loads(line) for line in lines[1:-1]]  # the last one has no end
        except ValueError:
            return []

    def _write(self, *values: Mapping[str, Any]) -> None:
        self._file.writelines(json.dumps(value) + "\n" for value in values)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
