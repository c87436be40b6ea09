"""The engine: ids in, ids out. It knows nothing of text."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from colibri.engine.archive import Archive
from colibri.engine.constraint import ConstraintFactory, ConstraintSpec
from colibri.engine.forward import Cancelled, Draft, ForwardModel, Progress, Routes, StatePool
from colibri.engine.generation import Generation, Ids, Inbox
from colibri.engine.limits import EngineLimits, tokens_allowed
from colibri.engine.messages import Event, Prefill
from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.engine.scheduler import Scheduler
from colibri.engine.session import Session
from colibri.engine.task import Listener, Task
from colibri.engine.teacher_forcing import drafted, teacher_forced, teacher_forced_parts
from colibri.errors import ContextLengthError, RequestError
from colibri.memory.budget import peak_rss, process_rss

TokenIds = Sequence[int] | NDArray[np.integer]
_SUMMED = (
    *("num_requests", "prompt_tokens", "reused_tokens", "completion_tokens", "decode_tokens"),
    *("ttft_s", "prefill_s", "decode_s"),
)


class Engine:
    """Computes requests: in the caller's thread, one at a time (`generate`), or many together.

    For the latter one thread calls `submit`, `cancel` and, again and again, `step`.

    Args:
        model: the model.
        pool: where attention state is borrowed.
        counts: expert traffic since the start.
        limits: what it may do.
        constraints: builds what restricts a reply, where anything does.
        clock: seconds.
        archive: keeps conversations on disk, if given.
    """

    def __init__(
        self,
        model: ForwardModel,
        pool: StatePool,
        counts: Callable[[], ExpertCounts],
        limits: EngineLimits,
        constraints: ConstraintFactory | None = None,
        clock: Callable[[], float] = perf_counter,
        archive: Archive | None = None,
    ) -> None:
        self.limits = limits
        self._model, self._pool, self._counts = model, pool, counts
        self._constraints, self._clock, self._archive = constraints, clock, archive
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._scheduler = Scheduler(
            model, pool, limits, counts, self._book, clock, archive, self._sessions
        )
        self._numbers = count()
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._total = Metrics()
        self._closed = False
        self._process = os.getpid()

    def open_session(self) -> Session:
        """A session to pass to `generate` again and again; close it to give its blocks back."""
        self._check_open()
        state, archive = self._pool.open_state(), self._archive
        session = Session(self._model, state, *(() if archive is None else (archive.wait,)))
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """End what is running, between two layers, and every session; the model may go then.

        What is kept on disk is written first.
        """
        self._closed = True
        if self._archive is not None:
            self._archive.close()
        for session in self._all_sessions():
            session.close()

    def _all_sessions(self) -> list[Session]:
        own = [*self._scheduler.sessions, *self._scheduler.prefixes.sessions]
        return list({*self._sessions, *own})

    def submit(
        self,
        request: GenerateRequest,
        listener: Listener,
        *,
        id: int | None = None,
        session: Session | None = None,
        shared: bool = True,
    ) -> Task:
        """Check a request and queue it; `step` computes it.

        Args:
            request: what is asked for. Sampling without a seed gets a random one.
            listener: who is told of it.
            id: in the messages; by default the next number.
            session: the caller's own; what it shares with the prompt is not computed again.
            shared: whether the request may begin with what others left, and leaves its own state.

        Raises:
            RequestError: an id outside the vocabulary, no ids, or more replies than sessions.
            ContextLengthError: prompt or reply do not fit the context.
            BusyError: too many wait already.
        """
        task = self._task(request, listener, id, session, shared)
        self._scheduler.submit(task)
        return task

    def cancel(
        self,
        task: Task,
        choice: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """End a reply of a task, or all; what has ended stays as it is."""
        self._scheduler.cancel(task, choice, reason)

    def step(self, poll: Callable[[], None] = lambda: None) -> bool:
        """Compute one pass; False where there is nothing to do.

        `poll` is called between layers, and may call `cancel`.
        """

        def polled() -> None:
            poll()
            if self._closed:
                for task in self._scheduler.tasks:
                    self._scheduler.cancel(task)

        self._scheduler.poll = polled
        return self._scheduler.step()

    def generate(
        self,
        ids: TokenIds,
        params: SamplingParams,
        *,
        session: Session | None = None,
        progress: Progress | None = None,
        cancelled: Cancelled = lambda: False,
        constraint: ConstraintSpec | None = None,
    ) -> Generation:
        """Check the request now; compute when the result is iterated over.

        With a `session`, what it shares with `ids` is not computed again. `progress` is told of
        the others. A token is run only when the one after it is asked for.

        Raises:
            RequestError, ContextLengthError: as `submit`.
        """
        inbox = Inbox(None if progress is None else _progress(progress))
        shared = self._archive is not None  # what is kept is there to be used
        held = None if constraint is None else dict(constraint)
        request = GenerateRequest(prompt=tuple(self.checked(ids)), params=params, constraint=held)
        task = self._task(request, Listener(inbox.tell, inbox.fail), None, session, shared)
        ids_of = self._drive(task, inbox, cancelled)
        return Generation(task, ids_of, self._scheduler.settle, self._memory)

    def _drive(self, task: Task, inbox: Inbox, cancelled: Cancelled) -> Ids:
        """Bound to no `Generation`, so that a reply which nobody holds any more ends at once."""

        def poll() -> None:
            if cancelled():
                self._scheduler.cancel(task)

        with self._taking_turn():
            self._check_open()
            self._scheduler.submit(task)
            try:
                while inbox.fresh or not task.is_over:
                    if inbox.fresh:
                        yield inbox.fresh.popleft()
                    else:
                        self.step(poll)
                if inbox.error is not None:
                    raise inbox.error
                return task.choices[0].reason
            finally:
                self._scheduler.cancel(task)

    def _task(
        self,
        request: GenerateRequest,
        listener: Listener,
        id: int | None,
        session: Session | None,
        shared: bool,
    ) -> Task:
        request = self._filled_in(request)
        spec, constraints = request.constraint, self._constraints
        if spec is not None and constraints is None:
            raise RequestError("constraint is given, but this engine has nothing that builds one")
        return Task(
            next(self._numbers) if id is None else id,
            request,
            self.limits.vocab_size,
            listener,
            requested=self._clock(),
            session=session,
            shared=shared,
            constrain=None if spec is None or constraints is None else lambda: constraints(spec),
        )

    def _filled_in(self, request: GenerateRequest) -> GenerateRequest:
        """The request with everything that it leaves open."""
        prompt, params, limits = self.checked(request.prompt), request.params, self.limits
        self.checked(params.stop_ids, "stop_ids")
        self.checked(tuple(params.logit_bias), "logit_bias")
        if request.n > limits.max_sessions:
            raise RequestError(
                f"n is {request.n}, but {limits.max_sessions} replies are computed together at "
                "most: ask for fewer, or raise max_sessions"
            )
        allowed = tokens_allowed(
            len(prompt), params.max_tokens, limits.context_length, limits.max_context_length
        )
        eos_ids = frozenset[int]() if params.ignore_eos else limits.eos_ids
        seed = params.seed
        if params.temperature > 0 and seed is None:
            seed = secrets.randbits(63)
        stop_ids = tuple(sorted(eos_ids.union(params.stop_ids)))
        params = replace(params, stop_ids=stop_ids, max_tokens=allowed, seed=seed)
        return replace(request, prompt=tuple(prompt), params=params)

    def logits(self, ids: TokenIds, *, routes: Routes | None = None) -> NDArray[np.float32]:
        """Teacher-forced logits `[T, V]` of `ids [T]`.

        Raises:
            RequestError: an id outside the vocabulary, or no ids.
            ContextLengthError: more ids than the context holds.
        """
        prompt = self._fitting(ids)
        with self._taking_turn(), self.open_session() as session:
            self._scheduler.make_room([(session, len(prompt))])
            return teacher_forced(session, prompt, self.limits.prefill_chunk, routes=routes)

    def logits_from(
        self,
        ids: TokenIds,
        first: int,
        session: Session | None = None,
        most_rows: int | None = None,
    ) -> Iterator[NDArray[np.float32]]:
        """Teacher-forced logits `[R, V]` from position `first` of `ids [T]` on, a pass at a time.

        A pass has `most_rows` at most. What `session` holds of the ids before `first` is not
        computed again; afterwards it holds all ids and, if recurrent, can go back to `first`. The
        engine serves nobody else until the iterator ends or is closed. Raises as `logits`.
        """
        prompt = self._fitting(ids)
        chunk = min(self.limits.prefill_chunk, most_rows or self.limits.prefill_chunk)
        with self._taking_turn(), ExitStack() as own:
            state = session or own.enter_context(self.open_session())
            kept = state.rewind_to_prefix_of(prompt[: first + 1])
            self._scheduler.make_room([(state, len(prompt) - kept)])
            yield from teacher_forced_parts(state, prompt[kept:], first - kept, chunk)

    def draft_logits(
        self, ids: TokenIds, draft: Draft, num_heads: int
    ) -> list[NDArray[np.float32]]:
        """Teacher-forced logits `[T - 1 - k, V]` of each of the model's drafting heads.

        Raises: as `logits`.
        """
        prompt = self._fitting(ids)
        with self._taking_turn(), self.open_session() as session:
            self._scheduler.make_room([(session, len(prompt))])
            return drafted(session, prompt, self.limits.prefill_chunk, draft, num_heads)

    def _fitting(self, ids: TokenIds) -> list[int]:
        """`ids` as a list that the context holds."""
        prompt = self.checked(ids)
        if len(prompt) > self.limits.context_length:
            raise ContextLengthError(
                f"there are {len(prompt)} ids, the context holds {self.limits.context_length}: "
                "shorten them, or raise context_length"
            )
        return prompt

    @property
    def positions(self) -> list[int]:
        """How far each session has come that somebody uses."""
        used = {*self._sessions, *self._scheduler.sessions}
        return sorted(session.position for session in used if not session.is_closed)

    def metrics(self) -> Metrics:
        """Everything since the start; the times are sums."""
        scheduler, pool = self._scheduler, self._pool
        total = replace(
            self._total,
            experts=self._counts(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_prefixes=len(scheduler.prefixes),
            num_unsaved=0 if self._archive is None else self._archive.num_saving,
            kv_blocks=pool.num_blocks,
            kv_free_blocks=pool.num_free,
        )
        return self._memory(total)

    def _memory(self, metrics: Metrics) -> Metrics:
        """The same with what the process occupies now."""
        return replace(
            metrics,
            rss_bytes=process_rss(),
            peak_rss_bytes=peak_rss(),
            ram_budget_bytes=self.limits.ram_budget_bytes,
            lossy=self.limits.lossy,
        )

    def checked(self, ids: TokenIds, name: str = "prompt") -> list[int]:
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
        found: list[int] = array.tolist()
        return found

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

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed")
        self._check_process()

    def _check_process(self) -> None:
        if self.is_forked:
            raise RequestError(
                "this model was opened before this process was forked: open it again in the child"
            )

    def _book(self, task: Task) -> None:
        total, more = self._total, task.metrics
        self._total = replace(
            total, **{name: getattr(total, name) + getattr(more, name) for name in _SUMMED}
        )


def _progress(progress: Progress) -> Callable[[Event], None]:
    """Prompt tokens that were computed, and all that have to be."""
    first: list[int] = []

    def tell(event: Event) -> None:
        if isinstance(event, Prefill):
            reused = (first or [event.done])[0]
            first.append(reused)
            progress(event.done - reused, event.total - reused)

    return tell
