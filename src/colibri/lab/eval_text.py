"""A text cut into windows in which every token is foretold once, and what a model foretells."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.engine.session import Session
from colibri.errors import RequestError, SettingsError, TextError
from colibri.llm import LLM
from colibri.llm.loading import Prepared

_LOGITS_BYTES, _SLICE_BYTES = 32 << 20, 2 << 20  # of a pass; of those that are looked at together
_ROWS = 32  # of a pass at least, whatever the vocabulary
OWN_BYTES = _LOGITS_BYTES + 8 * _SLICE_BYTES  # what an evaluation needs beside the model
_CONTEXT = 2048  # of a window, where nobody says another

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Ids `[T]` of one forward pass over a text; those from `first` on are foretold.

    `first` is at least 1: nothing foretells the first of all.
    """

    ids: list[int]
    first: int

    @property
    def num_foretold(self) -> int:
        """How many ids count."""
        return len(self.ids) - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text as a model reads it.

    Attributes:
        path: its file.
        digest: of the bytes that are read, and of how they are cut.
        num_bytes: of the text that is read.
        num_ids: its tokens.
        num_ids_of_file: tokens of the whole file.
        windows: what is computed.
    """

    path: Path
    digest: str
    num_bytes: int
    num_ids: int
    num_ids_of_file: int
    windows: list[Window]

    @property
    def num_foretold(self) -> int:
        """Tokens that count."""
        return sum(window.num_foretold for window in self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a text is cut.

    Attributes:
        context: tokens of a window; None takes what the context holds, at most 2,048.
        stride: tokens between the starts of two windows; None takes half a window.
        tokens: of the text that are read; None reads all.
        apart: whether windows do not overlap where no stride is given, but for what is needed.
    """

    context: int | None = None
    stride: int | None = None
    tokens: int | None = None
    apart: bool = False


def read_passage(path: Path, prepared: Prepared, cut: Cut) -> Passage:
    """Read a text, in the vocabulary of a model.

    Windows overlap, and a token is foretold in the first window that holds it, so that all but
    those of the first have at least `context - stride` tokens before them. Each window begins as
    the tokenizer begins a prompt.

    Raises:
        RequestError: no such text, it is too short, or it cannot be cut so.
        TextError: the model has no tokenizer.
    """
    tokenizer = prepared.tokenizer
    if tokenizer is None:
        raise TextError(f"{prepared.directory} has no tokenizer (tokenizer.json): text needs one")
    text = _read(path)
    start = tokenizer.encode_prompt("", special=False)
    ids = tokenizer.encode(text)
    kept = ids if cut.tokens is None else ids[: cut.tokens]
    context, stride = _sizes(cut, prepared.plan.context_length, len(start))
    windows = list(_windows(kept, start, context, stride))
    if not windows:
        raise RequestError(f"{path}: has {len(ids)} tokens: give a text of at least two")
    shown = text if kept is ids else tokenizer.decode(kept)
    about = f"{kept} {start} {context} {stride}"
    return Passage(
        path=path,
        digest=hashlib.blake2b(about.encode(), digest_size=16).hexdigest(),
        num_bytes=len(shown.encode()),
        num_ids=len(kept),
        num_ids_of_file=len(ids),
        windows=windows,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}: name a text file") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: byte {error.start} is no UTF-8: give a text file in UTF-8"
        ) from None


def _sizes(cut: Cut, held: int, start: int) -> tuple[int, int]:
    """Tokens of a window's text, and from one window to the next."""
    context = min(held, _CONTEXT) if cut.context is None else cut.context
    if context > held:
        raise SettingsError(
            f"a window of {context} tokens was asked for, the context holds {held}: ask for less, "
            "or raise context_length"
        )
    text = context - start
    widest = text if start else text - 1  # the first token of a window has something before it
    usual = widest if cut.apart else text // 2
    stride = max(1, usual) if cut.stride is None else cut.stride
    if text < 2 or not 1 <= stride <= widest:
        raise RequestError(
            f"windows of {context} tokens, {stride} apart, do not cover a text: give a window of "
            f"at least {start + 2} and a stride of 1 to {max(widest, 1)}"
        )
    return text, stride


def _windows(ids: list[int], start: list[int], size: int, stride: int) -> Iterator[Window]:
    done = 0 if start else 1
    for begin in range(0, len(ids), stride):
        end = min(begin + size, len(ids))
        if end > done:
            yield Window([*start, *ids[begin:end]], len(start) + done - begin)
        done = max(done, end)
        if end == len(ids):
            return


def log_probabilities(
    llm: LLM, window: Window, session: Session | None = None
) -> Iterator[tuple[NDArray[np.int32], Doubles]]:
    """The ids `[R]` that are foretold and the log-probabilities `[R, V]` of all, some at a time.

    In float64: `x - max - log sum exp(x - max)`. What `session` holds already is not computed.
    """
    at, row_bytes = window.first, 4 * llm.prepared.config.num_ids
    rows, step = max(_ROWS, _LOGITS_BYTES // row_bytes), max(1, _SLICE_BYTES // row_bytes)
    for logits in llm.logits_from(window.ids[:-1], at - 1, session=session, most_rows=rows):
        for first in range(0, len(logits), step):
            wide = logits[first : first + step].astype(np.float64)
            wide -= wide.max(axis=1, keepdims=True)
            wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
            yield np.asarray(window.ids[at : at + len(wide)], np.int32), wide
            at += len(wide)


def surprise(targets: NDArray[np.int32], log_probs: Doubles) -> Doubles:
    """Negative log-likelihood `[R]` of each target, in nats."""
    return np.asarray(-np.take_along_axis(log_probs, targets[:, None].astype(np.int64), 1)[:, 0])
