"""Keeps heat between runs, in `.coli_usage` beside the weights.

The file is text. The first line names the model, then come the experts that were used, `layer
expert count` a line (layers as the model numbers them), and last `end` with the number of those
lines. It is replaced whole: written beside and renamed, under a lock, with what other processes
added meanwhile. It only ever makes things faster, so no trouble with it stops anything: what was
wrong is said, once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.directory_lock import DirectoryLock
from colibri.memory.heat import Counts, added

NAME = ".coli_usage"
_TITLE = "colibri usage 1"


class Usage:
    """The heat file of one model.

    Attributes:
        counts: heat `[L, E]` as last read or written.
        notes: what is wrong with the file, in words; said once each.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        layers: Sequence[int],
        num_experts: int,
        *,
        suffix: str = "",
    ) -> None:
        """Read it, if it is there.

        `model` names the model that the counts belong to, `suffix` its file where others may be.
        """
        self.path = directory / f"{NAME}{suffix}"
        self.notes: list[str] = []
        self._model, self._layers = model, list(layers)
        self._shape = len(self._layers), num_experts
        self._usable = True
        self.counts = self._read()

    def add(self, uses: NDArray[np.int64]) -> bool:
        """Add `uses [L * E]` to what the file holds now; whether they are safe on disk."""
        if not self._usable:
            return False
        try:
            with DirectoryLock(self.path.parent, wait=True):
                self.counts = added(self._read(), uses.reshape(self._shape))
                if self._usable:
                    self._write()
        except OSError as error:
            self._usable = False
            self._say(f"{self.path} cannot be written ({error.strerror}): heat is not kept")
        return self._usable

    @property
    def _header(self) -> str:
        return f"# {_TITLE} {self._shape[0]}x{self._shape[1]} {self._model}"

    def _read(self) -> Counts:
        """What the file holds; nothing where it is absent, foreign or damaged."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return np.zeros(self._shape)
        except OSError as error:
            self._usable = False
            self._say(f"{self.path} cannot be read ({error.strerror}): nothing is known of heat")
            return np.zeros(self._shape)
        head, _, body = text.partition("\n")
        if head.startswith(f"# {_TITLE} ") and "\n" in text and head != self._header:
            self._usable = False
            self._say(
                f"{self.path} belongs to another model: it says {head[2:]!r}, this one is "
                f"{self._header[2:]!r}; it is neither used nor changed: delete it to begin anew"
            )
            return np.zeros(self._shape)
        counts = self._parsed(body) if head == self._header else None
        if counts is None:
            self._say(f"{self.path} is damaged: it is not used, and will be replaced")
            return np.zeros(self._shape)
        return counts

    def _parsed(self, body: str) -> Counts | None:
        """The counts, or None where a line is wrong or the end is missing."""
        lines = body.splitlines()
        if not body.endswith("\n") or lines[-1] != f"end {len(lines) - 1}":
            return None
        rows = {layer: row for row, layer in enumerate(self._layers)}
        counts = np.zeros(self._shape)
        try:
            for line in lines[:-1]:
                layer, expert, count = line.split(" ")
                counts[rows[int(layer)], _index(expert, self._shape[1])] = float(count)
        except (ValueError, KeyError):
            return None
        return counts if np.isfinite(counts).all() and (counts >= 0).all() else None

    def _write(self) -> None:
        lines = [self._header]
        for row, expert in np.argwhere(self.counts >= 0.001).tolist():
            lines.append(f"{self._layers[row]} {expert} {self.counts[row, expert]:.3f}")
        lines.append(f"end {len(lines) - 1}\n")
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix=f"{NAME}.", dir=self.path.parent, delete=False
        ) as file:
            beside = Path(file.name)
            try:
                file.write("\n".join(lines))
                file.close()
                beside.chmod(0o644)
                beside.replace(self.path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _index(text: str, size: int) -> int:
    value = int(text)
    if not 0 <= value < size:
        raise ValueError(text)
    return value
