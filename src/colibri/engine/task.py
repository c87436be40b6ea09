"""A request being computed: one prompt, one or several replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.engine.constraint import Constraint
from colibri.engine.logprobs import logprobs_of
from colibri.engine.messages import Event, Finished, Logprobs, Prefill, Started, Tokens
from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.request import FinishReason, GenerateRequest
from colibri.engine.sampler import Sampler
from colibri.engine.session import Session
from colibri.errors import RequestError


class Listener(NamedTuple):
    """Who is told what becomes of a request.

    Attributes:
        tell: called with every event; `Done` is the last.
        fail: called instead of that with the error that ended the request.
    """

    tell: Callable[[Event], None]
    fail: Callable[[Exception], None]


@dataclass(eq=False, slots=True)
class Spent:
    """What a request has cost so far, and when it came; see `Metrics` for the names."""

    requested: float
    reused_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    experts: ExpertCounts = field(default_factory=ExpertCounts)


class Task:
    """A request, checked and filled in.

    Attributes:
        id: in the messages about it.
        request: everything in it filled in.
        max_tokens: of each reply.
        session: the caller's own, which stays open; None to borrow state and give it back.
        shared: whether it may begin with what earlier requests left, and leaves its own.
        choices: its replies.
        spent: what it has cost.
        pending: replies that wait until the prompt has been read.
        reader: the reply that reads it.
        was_started: whether its turn has come.
        has_begun: whether a reply has begun.
        is_over: whether `Done` or an error was told.
    """

    def __init__(
        self,
        id: int,
        request: GenerateRequest,
        vocab_size: int,
        listener: Listener,
        *,
        requested: float,
        session: Session | None = None,
        shared: bool = False,
        constrain: Callable[[], Constraint] | None = None,
    ) -> None:
        self.id, self.request, self.listener = id, request, listener
        self.max_tokens = request.params.max_tokens
        self.session, self.shared = session, shared
        self.prompt = np.asarray(request.prompt, np.int32)
        self.spent = Spent(requested)
        self.was_started = self.has_begun = self.is_over = False
        self.choices = [
            Choice(
                self,
                index,
                Sampler(request.params, request.prompt, vocab_size, index),
                None if constrain is None else constrain(),
            )
            for index in range(request.n)
        ]
        self.pending = deque(self.choices)
        self.reader = self.choices[0]

    @property
    def unfinished(self) -> list[Choice]:
        """Replies that have not ended."""
        return [choice for choice in self.choices if choice.reason is None]

    def start(self, reused_tokens: int) -> None:
        """Its turn has come, and so many ids of the prompt need not be computed."""
        self.was_started, self.spent.reused_tokens = True, reused_tokens
        self.listener.tell(Started(id=self.id, reused_tokens=reused_tokens))
        self.tell_prefill(reused_tokens)

    def tell_prefill(self, done: int) -> None:
        """So many ids of the prompt are done."""
        self.listener.tell(Prefill(id=self.id, done=done, total=len(self.prompt)))

    def release(self, most: int | None = None) -> list[Choice]:
        """Replies that need not wait any more: all, or one that reads the prompt instead."""
        found = [choice for choice in self.pending if choice.reason is None][:most]
        self.pending = deque(c for c in self.pending if c.reason is None and c not in found)
        if found and not self.has_begun:
            self.reader = found[0]
        return found

    def spend(self, seconds: float) -> None:
        """Put time on its account."""
        if self.has_begun:
            self.spent.decode_s += seconds
        else:
            self.spent.prefill_s += seconds

    @property
    def metrics(self) -> Metrics:
        """What it has cost so far."""
        spent, tokens = self.spent, sum(len(choice.tokens) for choice in self.choices)
        return Metrics(
            num_requests=1,
            prompt_tokens=len(self.prompt),
            reused_tokens=spent.reused_tokens,
            completion_tokens=tokens,
            decode_tokens=tokens - sum(1 for choice in self.choices if choice.tokens),
            ttft_s=spent.ttft_s,
            prefill_s=spent.prefill_s,
            decode_s=spent.decode_s,
            experts=spent.experts,
        )


class Choice:
    """One reply: its tokens, and what of prompt and reply the model has to see next.

    Attributes:
        tokens: chosen or forced so far.
        session: its state; None while it waits.
        reason: why it ended; None before.
    """

    def __init__(
        self, task: Task, index: int, sampler: Sampler, constraint: Constraint | None
    ) -> None:
        self.task, self.index = task, index
        self.tokens: list[int] = []
        self.session: Session | None = None
        self.reason: FinishReason | None = None
        self._sampler, self._constraint = sampler, constraint
        self._stop_ids = frozenset(task.request.params.stop_ids)
        self._end: FinishReason | None = None  # known before log probabilities of the last ids are
        self._span = 0  # the id chosen last, and those that were forced behind it
        self._untold = 0  # forced ids whose log probabilities are still to come

    @property
    def length(self) -> int:
        """Of prompt and reply."""
        return len(self.task.prompt) + len(self.tokens)

    @property
    def target(self) -> int:
        """How much of them the model has to see."""
        return self.length - (self._end is not None)

    @property
    def position(self) -> int:
        """How much of them it has seen."""
        return 0 if self.session is None else self.session.position

    @property
    def is_decoding(self) -> bool:
        """Whether it has seen all but what was chosen last."""
        return 0 < self._span >= self.length - self.position

    def ids(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Prompt and reply from `start` to `end`."""
        prompt, end = self.task.prompt, self.length if end is None else end
        told = self.tokens[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return np.concatenate([prompt[start:end], np.asarray(told, np.int32)])

    def next_ids(self, most: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """At most so many ids for the model to see, and the rows that logits are wanted of."""
        start = self.position
        bounds = [start + most, self.target, *(at for at in self._marks() if at > start)]
        end = min(bounds)
        first = self.length - 1 - self._untold
        wanted = np.arange(max(first - start, 0), end - start, dtype=np.int32)
        return self.ids(start, end), wanted

    def remember(self) -> None:
        """Keep a recurrent state where a later prompt may turn off."""
        session, before_last = self.session, len(self.task.prompt) - 1
        if session is None:
            return
        if self.position in self._marks():
            session.snapshot(lasting=self.position in self.task.request.marks)
        elif session.slack and self.position == len(self.task.prompt):
            session.snapshot(before_last)

    def _marks(self) -> Sequence[int]:
        """Where a recurrent state is kept: no pass goes on beyond one.

        Before the last id of the prompt, because the same prompt asked again runs that again;
        a state that can be cut needs no pass of its own for that.
        """
        session, before_last = self.session, len(self.task.prompt) - 1
        if session is None or not session.is_recurrent:
            return ()
        marks = (*(at for at in self.task.request.marks if 0 < at < before_last),)
        return marks if session.slack else (*marks, before_last)

    def take(self, logits: NDArray[np.float32]) -> None:
        """Go on with `logits [R, V]` of the rows that were wanted, and tell of what follows.

        Raises:
            NumericsError: a logit is not finite.
            RequestError: its constraint allows nothing.
        """
        told: list[int] = []
        scores: list[Logprobs] = []
        top = self.task.request.top_logprobs
        for row in logits:
            told.append(self._following(row))
            if top is not None:
                scores.append(logprobs_of(row, told[-1], top))
        if self._end is None and not self._untold:
            forced = self._force()
            self._span = 1 + len(forced)
            if top is None:
                told += forced
            else:
                self._untold = len(forced)
        self._tell(Tokens, token_ids=tuple(told), logprobs=None if top is None else tuple(scores))
        if self._end is not None and not self._untold:
            self.finish(self._end)

    def finish(self, reason: FinishReason) -> None:
        """It ends here."""
        self.reason = reason
        self._tell(Finished, reason=reason)

    def _following(self, logits: NDArray[np.float32]) -> int:
        """The id behind a row: one that was forced, or one that is chosen now."""
        if self._untold:
            self._untold -= 1
            return self.tokens[-1 - self._untold]
        allowed = None if self._constraint is None else self._constraint.mask()
        if allowed is not None and not allowed.any():
            raise RequestError("the constraint allows no token here: it cannot be satisfied")
        token = self._sampler.choose(logits, allowed)
        self._append(token)
        return token

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._stop_ids:
            self._end = FinishReason.STOP
            return
        if self._constraint is not None:
            self._constraint.accept(token)
            if self._constraint.is_finished:
                self._end = FinishReason.STOP
                return
        if len(self.tokens) == self.task.max_tokens:
            self._end = FinishReason.LENGTH

    def _force(self) -> list[int]:
        """Ids that its constraint leaves no choice about."""
        forced: list[int] = []
        for token in () if self._constraint is None else self._constraint.forced():
            forced.append(self._sampler.force(token))
            self._append(token)
            if self._end is not None:
                break
        return forced

    def _tell(self, kind: type[Tokens] | type[Finished], **fields: Any) -> None:
        self.task.listener.tell(kind(id=self.task.id, choice=self.index, **fields))
