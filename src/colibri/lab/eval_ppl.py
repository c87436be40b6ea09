"""`coli eval ppl`: how surprised a model is by a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri.lab.bootstrap import mean_interval
from colibri.lab.envelope import Envelope
from colibri.lab.eval_ledger import Ledger, identity
from colibri.lab.eval_text import (
    OWN_BYTES,
    Cut,
    Passage,
    Window,
    log_probabilities,
    read_passage,
    surprise,
)
from colibri.llm import LLM
from colibri.llm.loading import LoadProgress
from colibri.settings import Settings

SCHEMA = "colibri.eval.ppl/1"
BLOCK = 64  # neighbouring tokens that intervals keep together
FOLDER = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """`exp` of the mean negative log-likelihood of a text's tokens.

    Attributes:
        passage: the text.
        surprises: in nats, token by token.
        resumed: windows that an earlier run had computed.
    """

    passage: Passage
    surprises: Sequence[float]
    resumed: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        mean = float(np.mean(self.surprises))
        low, high = mean_interval(self.surprises, BLOCK)
        return {
            "text": str(self.passage.path),
            "tokens": self.passage.num_ids,
            "tokens_of_text": self.passage.num_ids_of_file,
            "scored": len(self.surprises),
            "windows": len(self.passage.windows),
            "windows_resumed": self.resumed,
            "nll": mean,
            "perplexity": _exp(mean),
            "interval": [_exp(low), _exp(high)],
            "bits_per_byte": mean * len(self.surprises) / math.log(2) / self.passage.num_bytes,
        }


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def eval_ppl(
    texts: Sequence[Path], cut: Cut, settings: Settings, progress: LoadProgress
) -> Envelope:
    """The perplexity of each text.

    An evaluation that was interrupted goes on after the last window that was finished.

    Raises:
        RequestError, TextError: see `read_passage`.
        CheckpointError, SettingsError, BudgetError: as opening a model raises them.
    """
    with LLM.from_settings(settings, progress, OWN_BYTES) as llm:
        passages = [read_passage(path, llm.prepared, cut) for path in texts]
        found = [_perplexity(llm, passage, settings, progress) for passage in passages]
    results = [each.as_dict() for each in found]
    return Envelope(schema=SCHEMA, settings=settings.as_dict(), ceilings={}, results=results)


def _perplexity(
    llm: LLM, passage: Passage, settings: Settings, progress: LoadProgress
) -> Perplexity:
    about = identity(llm.prepared, "ppl", passage.digest)
    with Ledger(settings.cache / FOLDER, about) as ledger:
        resumed = ledger.num_resumed
        surprises = [x for piece in ledger.found for x in piece["surprises"]]
        for window in passage.windows[resumed:]:
            progress(f"reading {passage.path.name}", len(surprises), passage.num_foretold)
            own = surprises_of(llm, window)
            ledger.add({"surprises": own})
            surprises += own
        progress(f"reading {passage.path.name}", len(surprises), passage.num_foretold)
        ledger.finish()
    return Perplexity(passage=passage, surprises=surprises, resumed=resumed)


def surprises_of(llm: LLM, window: Window) -> list[float]:
    """Negative log-likelihoods, in nats, of the ids that a window foretells."""
    parts = log_probabilities(llm, window)
    return [x for targets, log_probs in parts for x in surprise(targets, log_probs).tolist()]
