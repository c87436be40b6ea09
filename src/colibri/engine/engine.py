"""The engine: ids in, ids out. It knows nothing of text."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from colibri.engine.decode import decode, tokens_allowed
from colibri.engine.forward import Cancelled, ForwardModel, Progress, Routes, SequenceState
from colibri.engine.generation import Generation, Tokens
from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.prefill import teacher_forced
from colibri.engine.request import SamplingParams
from colibri.engine.sampler import Sampler
from colibri.engine.session import Session
from colibri.errors import ContextLengthError, RequestError
from colibri.memory.budget import peak_rss, process_rss

Ids = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine may do with the model.

    Attributes:
        vocab_size: V; ids are below it.
        context_length: positions of a session.
        prefill_chunk: prompt tokens in one pass.
        eos_ids: the model's own end-of-turn ids.
        ram_budget_bytes: for reports.
        lossy: likewise, see `Metrics`.
        max_context_length: what `context_length` could be raised to; None where it is not known.
    """

    vocab_size: int
    context_length: int
    prefill_chunk: int
    eos_ids: frozenset[int] = frozenset()
    ram_budget_bytes: int = 0
    lossy: tuple[str, ...] = ()
    max_context_length: int | None = None


class Engine:
    """Runs one request at a time; others wait for their turn.

    Args:
        model: the model.
        open_state: borrows an empty attention state.
        counts: expert traffic since the start.
        limits: what it may do.
    """

    def __init__(
        self,
        model: ForwardModel,
        open_state: Callable[[], SequenceState],
        counts: Callable[[], ExpertCounts],
        limits: EngineLimits,
    ) -> None:
        self.limits = limits
        self._model = model
        self._open_state = open_state
        self._counts = counts
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._total = Metrics()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        self._process = os.getpid()

    def open_session(self) -> Session:
        """A session to pass to `generate` again and again; close it to give its blocks back."""
        if self._closed:
            raise RequestError("the engine is closed")
        self._check_process()
        session = Session(self._model, self._open_state())
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """End what is running, between two layers, and every session; the model may go then."""
        self._closed = True
        for session in list(self._sessions):
            session.close()

    def generate(
        self,
        ids: Ids,
        params: SamplingParams,
        *,
        session: Session | None = None,
        progress: Progress | None = None,
        cancelled: Cancelled = lambda: False,
    ) -> Generation:
        """Check the request now; compute when the result is iterated over.

        With a `session`, what it shares with `ids` is not computed again. A request that
        samples without a seed gets a random one.

        Raises:
            RequestError: an id outside the vocabulary, or no ids.
            ContextLengthError: prompt or reply do not fit the context.
        """
        prompt = self.checked(ids)
        self.checked(params.stop_ids, "stop_ids")
        self.checked(tuple(params.logit_bias), "logit_bias")
        limits = self.limits
        allowed = tokens_allowed(
            len(prompt), params.max_tokens, limits.context_length, limits.max_context_length
        )
        eos_ids = frozenset[int]() if params.ignore_eos else self.limits.eos_ids
        params = replace(params, stop_ids=tuple(sorted(eos_ids.union(params.stop_ids))))
        if params.temperature > 0 and params.seed is None:
            params = replace(params, seed=secrets.randbits(63))

        def run(generation: Generation) -> Tokens:
            with self._taking_turn(), self._borrowed(session) as own:
                generation.begin(own.rewind_to_prefix_of(prompt))
                del generation  # no cycle: a reply that nobody holds any more ends at once
                sampler = Sampler(params, prompt, self.limits.vocab_size)
                return (
                    yield from decode(
                        own,
                        prompt[own.position :],
                        sampler,
                        max_tokens=allowed,
                        stop_ids=params.stop_ids,
                        chunk=self.limits.prefill_chunk,
                        cancelled=lambda: self._closed or cancelled(),
                        progress=progress,
                    )
                )

        return Generation(run, params, len(prompt), self._counts, self._book, self._memory)

    def logits(self, ids: Ids, *, routes: Routes | None = None) -> NDArray[np.float32]:
        """Teacher-forced logits `[T, V]` of `ids [T]`.

        Raises:
            RequestError: an id outside the vocabulary, or no ids.
            ContextLengthError: more ids than the context holds.
        """
        prompt = self.checked(ids)
        if len(prompt) > self.limits.context_length:
            raise ContextLengthError(
                f"there are {len(prompt)} ids, the context holds {self.limits.context_length}: "
                "shorten them, or raise context_length"
            )
        with self._taking_turn(), self._borrowed(None) as session:
            return teacher_forced(session, prompt, self.limits.prefill_chunk, routes=routes)

    @property
    def positions(self) -> list[int]:
        """How far each open session has come."""
        return sorted(session.position for session in list(self._sessions) if not session.is_closed)

    def metrics(self) -> Metrics:
        """Everything since the start; the times are sums."""
        return self._memory(replace(self._total, experts=self._counts()))

    def _memory(self, metrics: Metrics) -> Metrics:
        """The same with what the process occupies now."""
        return replace(
            metrics,
            rss_bytes=process_rss(),
            peak_rss_bytes=peak_rss(),
            ram_budget_bytes=self.limits.ram_budget_bytes,
            lossy=self.limits.lossy,
        )

    def checked(self, ids: Ids, name: str = "prompt") -> list[int]:
        """`ids` as a list.

        Raises:
            RequestError: no ids (for a prompt), no integers, or one outside the vocabulary.
        """
        array = np.asarray(ids)
        if array.size == 0 and name != "prompt":
            return []
        if array.size == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RequestError(f"{name} must be one flat sequence of integer token ids")
        outside = np.flatnonzero((array < 0) | (array >= self.limits.vocab_size))
        if outside.size:
            raise RequestError(
                f"{name}[{outside[0]}] is {array[outside[0]]}: token ids of this model are at "
                f"least 0 and below {self.limits.vocab_size}"
            )
        return [int(token) for token in array]

    @contextmanager
    def _taking_turn(self) -> Iterator[None]:
        self._check_process()
        if self._holder == threading.get_ident():
            raise RequestError("this thread is in the middle of a reply: finish or close it first")
        with self._turn:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, which has locks as they were, and no threads."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self.is_forked:
            raise RequestError(
                "this model was opened before this process was forked: open it again in the child"
            )

    @contextmanager
    def _borrowed(self, session: Session | None) -> Iterator[Session]:
        """Yield the caller's session, which stays open, or one of our own, which does not."""
        if session is not None:
            yield session
            return
        with self.open_session() as own:
            yield own

    def _book(self, metrics: Metrics) -> None:
        total = self._total
        summed = {
            name: getattr(total, name) + getattr(metrics, name)
            for name in (
                *("num_requests", "prompt_tokens", "reused_tokens", "completion_tokens"),
                *("decode_tokens", "ttft_s", "prefill_s", "decode_s"),
            )
        }
        self._total = replace(total, **summed)
