"""What all endpoints share: the model, the engine, the limits, and how a request is begun."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from colibri.engine.messages import Ready
from colibri.engine.request import GenerateRequest
from colibri.engine.service import EngineService
from colibri.server.bodies import decode
from colibri.server.counters import Counters
from colibri.server.problems import FieldError, Problem
from colibri.server.prompts import Prompt
from colibri.server.replies import Ask, Output, Replies, Totals
from colibri.server.served_model import ServedModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server lets clients do.

    Attributes:
        api_key: what requests must show; None for no key.
        allowed_hosts: names in the Host header, without port; empty for any.
        cors_origins: web pages of these origins may ask.
        max_body_bytes: of a request.
        body_s: seconds in which a body must have arrived.
        send_s: seconds after which a client that takes nothing is given up.
        quiet_s: seconds after which a stream that has nothing to tell says that it lives.
    """

    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    body_s: float = 60.0
    send_s: float = 120.0
    quiet_s: float = 15.0


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The server's parts."""

    model: ServedModel
    engine: EngineService
    limits: Limits = field(default_factory=Limits)
    counters: Counters = field(default_factory=Counters)

    @property
    def ready(self) -> Ready:
        """What the engine said when it was loaded.

        Raises:
            Problem: it is still loading.
        """
        ready = self.engine.ready
        if ready is None:
            raise Problem(503, "the model is being loaded", None, "loading", {"retry-after": "5"})
        return ready

    @property
    def context_length(self) -> int:
        """Positions of a session; raises as `ready`."""
        return self.ready.context_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; raises as `ready`."""
        return self.ready.vocab_size


@dataclass(slots=True)
class Call:
    """One HTTP request whose body has arrived.

    Attributes:
        serving: the server's parts.
        request: its head.
        body: as it came.
        stack: what must be given back when the request ends in whatever way.
    """

    serving: Serving
    request: Request
    body: bytes
    stack: AsyncExitStack
    created: int = field(default_factory=lambda: int(time.time()))

    def read(self, kind: type[T]) -> T:
        """The body as a type; raises `Problem` and `FieldError` as `bodies.decode`."""
        return decode(self.body, kind)

    async def begin(
        self,
        prompt: Prompt,
        sampling: dict[str, Any],
        *,
        stop: tuple[str, ...] = (),
        n: int = 1,
        top_logprobs: int | None = None,
        caps: bool = False,
    ) -> Replies:
        """Ask the engine; returns when it has accepted.

        `caps`: `max_tokens` is only a bound, and may exceed what the context has left.

        Raises:
            RequestError: what is asked cannot be honoured; the message names the field.
            BusyError, ShuttingDownError, EngineDiedError: not now.
        """
        serving = self.serving
        ids = [*(sampling.pop("stop_ids", None) or ()), *prompt.stop_ids]
        self._check_ids(prompt.ids, "prompt")
        self._check_ids(ids, "stop_ids")
        self._check_ids(sampling.get("logit_bias") or (), "logit_bias")
        params = serving.model.defaults.params(**sampling, stop_ids=ids)
        room = serving.context_length - len(prompt.ids)
        if caps and params.max_tokens is not None and 0 < room < params.max_tokens:
            params = replace(params, max_tokens=None)
        request = GenerateRequest(
            prompt=prompt.ids,
            params=params,
            n=n,
            top_logprobs=top_logprobs,
            constraint=prompt.constraint,
            marks=prompt.marks,
        )
        reply = await serving.engine.submit(request)
        await self.stack.enter_async_context(reply)
        ask = Ask(prompt=prompt, request=request, stop=stop)
        return Replies(ask, reply, serving.model.tokenizer)

    def _check_ids(self, ids: Iterable[int], field: str) -> None:
        """Refuse ids that the model does not have, before they go anywhere."""
        most = self.serving.vocab_size
        for token in ids:
            if not 0 <= token < most:
                raise FieldError(field, f"{token} is no token id: at least 0 and below {most}")

    async def all_of(self, replies: Replies) -> list[Output]:
        """Wait for everything there is to tell."""
        return [output async for output in replies.outputs()]


def totals_of(outputs: list[Output]) -> Totals:
    """The totals at the end of all outputs."""
    last = outputs[-1]
    assert isinstance(last, Totals)
    return last


Handler = Callable[[Call], Awaitable[ASGIApp]]
