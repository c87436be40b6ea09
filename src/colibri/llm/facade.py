"""`LLM`: a model in memory, asked in text or in token ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from colibri.engine.constraint import ConstraintSpec
from colibri.engine.engine import Engine
from colibri.engine.engine import TokenIds as Ids
from colibri.engine.forward import Cancelled, Progress, Routes
from colibri.engine.limits import EngineLimits
from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.session import Session
from colibri.errors import RequestError, TextError
from colibri.llm.archives import open_archive
from colibri.llm.completion import Completion, ReplyText, Stream
from colibri.llm.heat_keeper import HeatKeeper
from colibri.llm.inspection import inspected
from colibri.llm.loading import LoadProgress, Prepared, open_model
from colibri.llm.options import RequestOptions, Stop, check_names
from colibri.llm.route_trace import RouteTrace, TracedModel
from colibri.models.model import Model
from colibri.models.plan import Plan
from colibri.settings import Settings
from colibri.text import Message, Tokenizer, encode_chat
from colibri.text.constraint import Constraints

Prompt = str | Ids


class LLM:
    """A loaded model. Build it with `LLM.open`, and use it in a `with` or close it.

    Requests of several threads are served one after another.
    """

    def __init__(
        self,
        prepared: Prepared,
        model: Model,
        heat: HeatKeeper | None = None,
        route_trace: RouteTrace | None = None,
    ) -> None:
        self.prepared = prepared
        self._model: Model | None = model
        self._heat, self._route_trace = heat, route_trace
        limits = EngineLimits(
            vocab_size=prepared.config.num_ids,
            context_length=prepared.plan.context_length,
            prefill_chunk=prepared.plan.prefill_chunk,
            max_sessions=prepared.plan.max_sessions,
            max_waiting=prepared.settings.max_waiting,
            max_stall_s=prepared.settings.max_stall,
            eos_ids=prepared.eos_ids,
            ram_budget_bytes=prepared.plan.budget_bytes,
            lossy=prepared.lossy,
            max_context_length=prepared.config.max_position_embeddings,
        )
        runner = model if route_trace is None else TracedModel(model, route_trace)
        constraints = None
        if prepared.tokenizer is not None:
            constraints = Constraints(prepared.tokenizer, limits.vocab_size, limits.eos_ids)
        self._notes: list[str] = []
        archive = open_archive(prepared, model, self._notes.append)
        counts = _counts_of(model)
        self._engine = Engine(runner, model.kv, counts, limits, constraints, archive=archive)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        progress: LoadProgress | None = None,
        **settings: object,
    ) -> Self:
        """Open a checkpoint.

        Args:
            path: its directory; by default `COLIBRI_MODEL`, then the model that comes along.
            progress: called with stage, done and total while weights are loaded.
            settings: any field of `colibri.settings.Settings` by name.

        Raises:
            SettingsError: an unknown setting, or a value that is not allowed.
            CheckpointError, TextError: the checkpoint cannot be used; the message names what.
            BudgetError: it does not fit the memory budget; the message says by how much.
        """
        if path is not None:
            if settings.get("model") is not None:
                raise RequestError("give the model as path or as `model`, not both")
            settings["model"] = path
        return cls.from_settings(Settings.resolve(**settings), progress)

    @classmethod
    def from_settings(
        cls, settings: Settings, progress: LoadProgress | None = None, other_bytes: int = 0
    ) -> Self:
        """Open what the settings say; see `open`.

        `other_bytes` is resident memory of other processes of the program, part of the budget.
        """
        opened = open_model(settings, progress, other_bytes)
        return cls(opened.prepared, opened.model, opened.heat, opened.route_trace)

    @property
    def settings(self) -> Settings:
        """What it was opened with."""
        return self.prepared.settings

    def __repr__(self) -> str:
        prepared, plan = self.prepared, self.prepared.plan
        closed = "closed, " if self._model is None else ""
        return (
            f"<LLM {prepared.directory}: {closed}{plan.num_slots:,} of {plan.num_experts:,} "
            f"experts in memory, context {plan.context_length:,}, {prepared.kernels.name} kernels>"
        )

    @property
    def engine(self) -> Engine:
        """What computes, for those who want many requests computed together.

        Raises:
            RequestError: the model is closed.
        """
        return self._running()

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self.prepared.template is not None

    def logits(self, ids: Ids, *, routes: Routes | None = None) -> NDArray[np.float32]:
        """Logits `[T, V]` after each of `ids [T]`, every id being given (teacher-forced).

        `routes(layer, routing)` sees the experts chosen.

        Raises:
            RequestError: no ids, or one outside the vocabulary.
            ContextLengthError: more ids than the context holds.
        """
        return self._running().logits(ids, routes=routes)

    def logits_from(
        self, ids: Ids, first: int, *, session: Session | None = None, most_rows: int | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """As `logits`, but only of the positions from `first` on, `[R, V]` a pass at a time.

        So a long text needs little memory. What a `session` holds of the ids before `first` is not
        computed again: several continuations of one text read it once.

        Raises:
            RequestError, ContextLengthError: as `logits`.
        """
        return self._running().logits_from(ids, first, session, most_rows)

    def mtp_logits(self, ids: Ids) -> list[NDArray[np.float32]]:
        """Teacher-forced logits of the heads that draft further tokens (multi-token prediction).

        Row t of head k, `[T - 1 - k, V]`, has seen ids up to and with t + k + 1 and foresees the
        next.

        Raises:
            RequestError: as `logits`, or the model was opened without `mtp=True`.
            ContextLengthError: more ids than the context holds.
        """
        engine, model = self._running(), self._model
        if model is None or not model.heads:
            raise RequestError("this model was opened without its drafting heads: open it with mtp")
        return engine.draft_logits(ids, model.draft, len(model.heads))

    def generate(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Completion:
        """Continue a prompt; the arguments are those of `stream`."""
        return _finished(self.stream(prompt, **request))

    def chat(self, messages: Sequence[Message], **request: Unpack[RequestOptions]) -> Completion:
        """Answer a conversation; the arguments are those of `stream_chat`."""
        return _finished(self.stream_chat(messages, **request))

    def stream(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Stream:
        """Continue a prompt piece by piece.

        Args:
            prompt: text, which gets BOS where the tokenizer adds it, or token ids as they are.
            request: see `RequestOptions`. What is not given comes from the checkpoint's
                generation_config.json where that says `do_sample`, else decoding is greedy.

        Raises:
            RequestError: an argument that is unknown, of a wrong type or out of range.
            ContextLengthError: prompt or reply do not fit the context.
            TextError: text is asked for and the checkpoint has no tokenizer.
        """
        return self._start(self.encode(prompt), **request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **request: Unpack[RequestOptions],
    ) -> Stream:
        """Answer a conversation piece by piece.

        Args:
            messages: mappings with `role` and `content`, oldest first.
            tools: functions on offer, as JSON schemas.
            template_variables: further variables of the chat template.
            request: as for `stream`.

        Raises:
            TextError: the checkpoint has no tokenizer or no chat template, or the template refuses.
        """
        return self._start(self.encode_chat(messages, tools, template_variables), **request)

    def encode(self, prompt: Prompt) -> Ids:
        """The ids that a prompt stands for.

        Raises:
            TextError: a text, and the checkpoint has no tokenizer.
        """
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizer("a text prompt")
        bos = tokenizer.special_tokens.get("bos_token")
        ids = tokenizer.encode_prompt(prompt)
        if not ids and bos is not None and (token := tokenizer.id_of(bos)) is not None:
            return [token]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation, the assistant's turn opened.

        Raises:
            TextError: the checkpoint has no tokenizer or no chat template, or the template refuses.
            RequestError: `messages` is no list of messages.
        """
        if isinstance(messages, str) or not all(
            isinstance(message, Mapping) and "role" in message for message in messages
        ):
            raise RequestError("messages must be a list of mappings, each with a role")
        tokenizer = self._tokenizer("a conversation")
        template = self.prepared.template
        if template is None:
            raise TextError(
                f"{self.prepared.directory} has no chat template: it is a plain continuation "
                "model; use generate or stream"
            )
        return encode_chat(tokenizer, template, messages, tools=tools, **(template_variables or {}))

    def open_session(self) -> Session:
        """State to pass to requests as `session=`; what they share is computed once. Close it."""
        return self._running().open_session()

    def metrics(self) -> Metrics:
        """Everything since the model was opened."""
        return self._running().metrics()

    def inspect(self) -> dict[str, Any]:
        """What is in memory, on its way and waited for just now, as JSON can hold it."""
        engine, model = self._running(), self._model
        return {} if model is None else inspected(engine, model)

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not work and does no harm, such as a heat file that cannot be written."""
        return (*self._notes, *(() if self._heat is None else self._heat.notes))

    def save_heat(self) -> None:
        """Write down which experts were busy, as every reply does when it ends."""
        if self._heat is not None:
            self._heat.save()

    def plan(self) -> Plan:
        """How the memory budget was divided."""
        return self.prepared.plan

    def close(self) -> None:
        """Give the memory back; closing twice is fine. In a forked child it is the parent's."""
        model, self._model = self._model, None
        if model is not None and not self._engine.is_forked:
            self._engine.close()
            if self._heat is not None:
                self._heat.save()
            if self._route_trace is not None:
                self._route_trace.close()
            model.close()

    def _start(
        self,
        ids: Ids,
        *,
        stop: Stop = None,
        session: Session | None = None,
        progress: Progress | None = None,
        cancelled: Cancelled = lambda: False,
        constraint: ConstraintSpec | None = None,
        **sampling: Any,
    ) -> Stream:
        check_names(sampling)
        params = self.prepared.defaults.params(**sampling)
        tokenizer = self.prepared.tokenizer if not stop else self._tokenizer("a stop string")
        text = None if tokenizer is None else ReplyText(tokenizer, stop or None)
        generation = self._running().generate(
            ids,
            params,
            session=session,
            progress=progress,
            cancelled=cancelled,
            constraint=constraint,
        )
        return Stream(generation, text, self.save_heat)

    def _tokenizer(self, wanted_for: str) -> Tokenizer:
        tokenizer = self.prepared.tokenizer
        if tokenizer is None:
            raise TextError(
                f"{wanted_for} needs a tokenizer, and {self.prepared.directory} has none "
                "(tokenizer.json): give token ids"
            )
        return tokenizer

    def _running(self) -> Engine:
        if self._model is None:
            raise RequestError("this model is closed: open it again")
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _finished(stream: Stream) -> Completion:
    with stream:
        for _ in stream:
            pass
    return stream.completion


def _counts_of(model: Model) -> Callable[[], ExpertCounts]:
    def counts() -> ExpertCounts:
        stats = model.store.stats
        ahead, foresight = stats.predicted, model.prefetcher.stats
        return ExpertCounts(
            requests=stats.requests,
            hits=stats.hits,
            misses=stats.misses,
            prefetched=stats.prefetched - stats.withdrawn,
            wanted=foresight.wanted - foresight.wanted_by_two,
            foreseen=foresight.foreseen - foresight.foreseen_by_two,
            bytes_read=stats.bytes_read,
            slack_bytes=stats.slack_bytes,
            abandoned_bytes=stats.abandoned_bytes,
            ahead_bytes=ahead.read - ahead.withdrawn,
            ahead_useful_bytes=ahead.useful,
            ahead_late_bytes=ahead.late,
            ahead_wasted_bytes=ahead.wasted,
            table_bytes=sum(table.stats.bytes_read for table in model.tables),
        )

    return counts
