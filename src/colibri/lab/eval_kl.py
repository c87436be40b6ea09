"""`coli eval kl`: how far one setting's predictions are from another's on the same text.

The reference's log-probabilities of every token are kept in a file meanwhile, in float32, so that
only one model is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.errors import RequestError, SettingsError
from colibri.formats import Floats
from colibri.lab.bootstrap import mean_interval
from colibri.lab.envelope import Envelope
from colibri.lab.eval_ledger import Ledger, identity
from colibri.lab.eval_ppl import BLOCK, FOLDER
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
from colibri.units import format_bytes

SCHEMA = "colibri.eval.kl/1"
_SPARE_BYTES = 256 << 20  # that stay free on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What a text's tokens tell of two settings, token by token.

    Attributes:
        passage: the text.
        kl: `sum_v p_v (log p_v - log q_v)` in nats, p being the reference.
        agree: whether both find the same token likeliest.
        surprises: negative log-likelihoods under the setting that is judged.
        reference: the same under the reference.
        resumed: windows that an earlier run had computed.
    """

    passage: Passage
    kl: Sequence[float]
    agree: Sequence[bool]
    surprises: Sequence[float]
    reference: Sequence[float]
    resumed: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        ratio = np.subtract(self.surprises, self.reference)
        return {
            "text": str(self.passage.path),
            "tokens": self.passage.num_ids,
            "tokens_of_text": self.passage.num_ids_of_file,
            "scored": len(self.kl),
            "windows": len(self.passage.windows),
            "windows_resumed": self.resumed,
            "kl": float(np.mean(self.kl)),
            "interval": list(mean_interval(self.kl, BLOCK)),
            "kl_median": float(np.median(self.kl)),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "kl_max": float(np.max(self.kl)),
            "top1_agreement": float(np.mean(self.agree)),
            "top1_interval": list(mean_interval([float(x) for x in self.agree], BLOCK)),
            "nll": float(np.mean(self.surprises)),
            "reference_nll": float(np.mean(self.reference)),
            "perplexity_ratio": float(np.exp(np.mean(ratio))),
            "perplexity_ratio_interval": [
                float(np.exp(end)) for end in mean_interval(ratio.tolist(), BLOCK)
            ],
        }


def eval_kl(
    texts: Sequence[Path],
    cut: Cut,
    settings: Settings,
    reference: Settings,
    progress: LoadProgress,
) -> Envelope:
    """The divergence of `settings` from `reference` on each text.

    An evaluation that was interrupted goes on after the last window that was finished.

    Raises:
        RequestError, TextError: see `read_passage`; the two read the text differently.
        SettingsError: the disk does not hold what has to be kept meanwhile.
        CheckpointError, BudgetError: as opening a model raises them.
    """
    with LLM.from_settings(reference, progress, OWN_BYTES) as llm:
        passages = [read_passage(path, llm.prepared, cut) for path in texts]
        kept = [_Kept(llm, passage, settings.cache / FOLDER) for passage in passages]
        _require_room(kept)
        for each in kept:
            each.fill(llm, progress)
    with LLM.from_settings(settings, progress, OWN_BYTES) as llm:
        found = [_divergence(llm, each, settings, cut, progress) for each in kept]
    for each in kept:
        each.remove()
    shown = settings.as_dict() | {"reference": reference.as_dict()}
    results = [each.as_dict() for each in found]
    return Envelope(schema=SCHEMA, settings=shown, ceilings={}, results=results)


class _Kept:
    """The reference's log-probabilities `[R, V]` of a passage, in a file."""

    def __init__(self, llm: LLM, passage: Passage, folder: Path) -> None:
        self.passage, self.folder = passage, folder
        self.vocab_size = llm.prepared.config.num_ids
        self.about = identity(llm.prepared, "reference", passage.digest)
        with Ledger(folder, self.about) as ledger:
            self.path = ledger.path.with_suffix(".logprobs")
        self.nbytes = passage.num_foretold * self.vocab_size * 4

    @property
    def missing_bytes(self) -> int:
        """What is still to be written."""
        return self.nbytes - (self.path.stat().st_size if self.path.is_file() else 0)

    def fill(self, llm: LLM, progress: LoadProgress) -> None:
        """Compute what is not there yet."""
        stage = f"reference, {self.passage.path.name}"
        windows = self.passage.windows
        with Ledger(self.folder, self.about) as ledger, self.path.open("ab") as file:
            ledger.truncate(self._whole_windows(ledger.num_resumed))
            done = sum(window.num_foretold for window in windows[: len(ledger.found)])
            file.truncate(done * self.vocab_size * 4)
            for window in windows[len(ledger.found) :]:
                progress(stage, done, self.passage.num_foretold)
                for _, log_probs in log_probabilities(llm, window):
                    file.write(log_probs.astype(np.float32).tobytes())
                file.flush()
                ledger.add({"foretold": window.num_foretold})
                done += window.num_foretold
            progress(stage, done, self.passage.num_foretold)

    def _whole_windows(self, told: int) -> int:
        """How many of the windows that the ledger tells of are in the file."""
        size, at = self.path.stat().st_size, 0
        for number, window in enumerate(self.passage.windows[:told]):
            at += window.num_foretold * self.vocab_size * 4
            if at > size:
                return number
        return told

    def windows(self) -> Iterator[tuple[Window, Floats]]:
        """Each window and its rows `[R, V]`, which are read when they are looked at."""
        shape = (self.passage.num_foretold, self.vocab_size)
        rows = np.memmap(self.path, np.float32, "r", shape=shape)
        at = 0
        for window in self.passage.windows:
            yield window, rows[at : at + window.num_foretold]
            at += window.num_foretold

    def remove(self) -> None:
        """It has served."""
        self.path.unlink(missing_ok=True)
        with Ledger(self.folder, self.about) as ledger:
            ledger.finish()


def _require_room(kept: Sequence[_Kept]) -> None:
    missing = sum(each.missing_bytes for each in kept)
    free = shutil.disk_usage(kept[0].folder).free
    if missing + _SPARE_BYTES > free:
        rows = max(1, (free - _SPARE_BYTES) // (4 * kept[0].vocab_size))
        raise SettingsError(
            f"{kept[0].folder}: the reference's predictions take {format_bytes(missing)}, "
            f"{format_bytes(free)} are free: read fewer tokens (--tokens {rows}), or name a "
            "cache_dir on a larger disk"
        )


def _divergence(
    llm: LLM, kept: _Kept, settings: Settings, cut: Cut, progress: LoadProgress
) -> Divergence:
    passage = kept.passage
    own = read_passage(passage.path, llm.prepared, cut)
    if own.digest != passage.digest or llm.prepared.config.num_ids != kept.vocab_size:
        raise RequestError(
            f"{passage.path}: {llm.prepared.directory} and the reference read it as different "
            "tokens or windows: compare models of one vocabulary, and state --context"
        )
    about = identity(llm.prepared, "kl", f"{passage.digest} {kept.about['model']}")
    stage = f"comparing, {passage.path.name}"
    with Ledger(settings.cache / FOLDER, about) as ledger:
        resumed, done = ledger.num_resumed, 0
        for number, (window, rows) in enumerate(kept.windows()):
            progress(stage, done, passage.num_foretold)
            if number >= resumed:
                ledger.add(_compared(llm, window, rows))
            done += window.num_foretold
        progress(stage, done, passage.num_foretold)
        found = ledger.found
        ledger.finish()
    names = ("kl", "agree", "surprises", "reference")
    joined = {name: [x for piece in found for x in piece[name]] for name in names}
    return Divergence(passage=passage, resumed=resumed, **joined)


def _compared(llm: LLM, window: Window, rows: Floats) -> dict[str, list[Any]]:
    """What each token of a window tells."""
    found: dict[str, list[Any]] = {"kl": [], "agree": [], "surprises": [], "reference": []}
    at = 0
    for targets, exact in log_probabilities(llm, window):
        ours = exact.astype(np.float32).astype(np.float64)  # rounded as the reference was
        reference = rows[at : at + len(ours)].astype(np.float64)
        found["kl"] += kl_divergence(reference, ours).tolist()
        found["agree"] += (reference.argmax(axis=1) == ours.argmax(axis=1)).tolist()
        found["surprises"] += surprise(targets, ours).tolist()
        found["reference"] += surprise(targets, reference).tolist()
        at += len(ours)
    return found


def kl_divergence(
    reference: NDArray[np.float64], other: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`sum_v p_v (log p_v - log q_v)` `[R]` of log-probabilities `[R, V]`, p the reference."""
    return np.asarray((np.exp(reference) * (reference - other)).sum(axis=1))
