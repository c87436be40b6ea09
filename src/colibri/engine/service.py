"""An engine as the server sees it: asynchronous, and in another process.

    service = …                                  # an EngineService
    ready = await service.start()
    reply = await service.submit(GenerateRequest(prompt=(1, 2, 3), n=2))
    async with reply:
        async for event in reply:                # Started, Prefill, Tokens, Finished, Done
            …
            reply.cancel(choice=1, reason=FinishReason.STOP)
    await service.close()

Both protocols belong to one event loop.
"""

from __future__ import annotations

from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from colibri.engine.messages import Event, Ready
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams


class Health(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"  # loading, for the first time or again
    READY = "ready"
    FAILED = "failed"  # it cannot be started; `EngineService.failure` says why
    CLOSING = "closing"  # no more requests


class Reply(Protocol):
    """The events of one request, in order. After an error or `Done` there are no more.

    The events of each reply are `Tokens`, then one `Finished`; those of different choices
    interleave. Leaving `async with` cancels what is not finished.

    Attributes:
        id: of the request.
        params: what holds for it, everything filled in (see `Accepted`).
    """

    id: int
    params: SamplingParams

    def __aiter__(self) -> Self:
        """Itself."""

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            ReadError, NumericsError, …: what ended the request, as its type.
            EngineDiedError: the engine's process ended.
        """

    def cancel(
        self, choice: int | None = None, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        """Give up one reply, or all. Returns at once; cancelling what has ended does nothing.

        `Finished` with the reason comes for each that was running, then `Done`. Tokens that were
        on the way may still come before it; they are not counted.
        """

    async def __aenter__(self) -> Self:
        """Itself."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what is not finished."""


class EngineService(Protocol):
    """An engine that is started again when it dies."""

    @property
    def health(self) -> Health:
        """What it is doing now."""

    @property
    def failure(self) -> Exception | None:
        """Why it is not ready, where it failed."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was loaded last; None before it was."""

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have not ended."""

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises:
            CheckpointError, BudgetError, …: why it cannot be, as its type.
            EngineDiedError: the process ended while it loaded.
        """

    async def submit(self, request: GenerateRequest) -> Reply:
        """Queue a request; returns when the engine has accepted it.

        Raises:
            RequestError, ContextLengthError: it cannot be honoured; the message names the field.
            BusyError: too many wait already.
            ShuttingDownError: after `close` was called.
            EngineDiedError: the engine is not running; it is being started again.
        """

    async def metrics(self) -> Metrics:
        """A snapshot, taken between two passes; raises EngineDiedError."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those that run end for so many seconds, end the process."""
