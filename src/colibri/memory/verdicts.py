"""Keeps the governor's verdicts between runs, in `.coli_prefetch` beside the heat.

The file is JSON: the model that it belongs to, and for each number of slots whether it paid to look
one and two layers ahead, and what that gained. It is replaced whole. Nothing depends on it: what
cannot be read is not known, and what cannot be written is found out again.
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from colibri.memory.governor import Governor, Trial
from colibri.memory.receipt import write_atomically

NAME = ".coli_prefetch"
_TITLE = "colibri prefetch 1"
_MOST = 16  # numbers of slots; the smallest go first
_log = logging.getLogger(__name__)


class Verdicts:
    """What is known of one model with one number of slots.

    Attributes:
        governor: begins with what the file says.
    """

    def __init__(self, directory: Path, model: str, num_slots: int, *, suffix: str = "") -> None:
        """Read the file, if it is there.

        `model` names the model that verdicts belong to, `suffix` its file where others may be.
        """
        self.path = directory / f"{NAME}{suffix}"
        self._model, self._slots = model, str(num_slots)
        about = self._known().get(self._slots, {})
        about = about if isinstance(about, dict) else {}
        self.governor = Governor(_trial(about.get("one")), _trial(about.get("two")))
        self._saved = self._figures()

    def save(self) -> None:
        """Write what has changed."""
        figures = self._figures()
        if figures == self._saved:
            return
        self._saved = figures
        known = {**self._known(), self._slots: figures}
        kept = sorted((k for k in known if k.isdecimal()), key=int)[-_MOST:]
        told = {
            "title": _TITLE,
            "model": self._model,
            "slots": {k: known[k] for k in kept} | {self._slots: figures},
        }
        try:
            write_atomically(self.path, json.dumps(told, indent=1) + "\n")
        except OSError as error:
            _log.info("%s cannot be written (%s)", self.path, error.strerror)

    def _figures(self) -> dict[str, Any]:
        trials = {"one": self.governor.first, "two": self.governor.second}
        return {
            name: {"pays": trial.pays, "gain": round(trial.gain, 4)}
            for name, trial in trials.items()
            if trial.gain is not None
        }

    def _known(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("title") == _TITLE:
                slots = found.get("slots")
                if found.get("model") == self._model and isinstance(slots, dict):
                    return slots
        return {}


def _trial(about: object) -> Trial | None:
    """As the file has it; None where that makes no sense."""
    if not isinstance(about, dict):
        return None
    pays, gained = about.get("pays"), about.get("gain")
    if not isinstance(pays, bool) or not isinstance(gained, float) or not math.isfinite(gained):
        return None
    return Trial(pays, gained)
