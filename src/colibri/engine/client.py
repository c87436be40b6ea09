"""The client's side of the boundary: an engine in another process, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from colibri.engine.link import Link
from colibri.engine.messages import (
    Accepted,
    AskMetrics,
    Cancel,
    Done,
    Event,
    Failed,
    Loading,
    Message,
    MetricsAnswer,
    Open,
    Planned,
    Ready,
    Shutdown,
    Submit,
    ToClient,
    frame,
    raised,
)
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.engine.service import Health
from colibri.errors import EngineDiedError, ShuttingDownError

_log = logging.getLogger("colibri.engine")
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 30.0)  # before each attempt; then it has failed
_END_S = 10.0  # for a process to end by itself


class EngineProcess(Protocol):
    """What was started at the other end of a socket."""

    async def wait(self) -> str:
        """Wait until it has ended; return how, in words."""

    def kill(self) -> None:
        """End it now; nothing if it has."""


Answer: TypeAlias = Accepted | MetricsAnswer | Failed
Launch: TypeAlias = Callable[[socket.socket], Awaitable[EngineProcess]]


class ClientReply:
    """See `service.Reply`."""

    def __init__(self, client: EngineClient, id: int, params: SamplingParams) -> None:
        self.id, self.params = id, params
        self._client = client
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._ended: Exception | bool = False

    def hear(self, event: Event | Exception) -> None:
        """The engine has said something about it."""
        self._events.put_nowait(event)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended = isinstance(event, Done | Exception)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(
        self, choice: int | None = None, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        """See `service.Reply.cancel`."""
        self._client.say(self.id, Cancel(id=self.id, choice=choice, reason=reason))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ended:
            self.cancel()


@dataclass(slots=True, eq=False)
class Connection:
    """One process, from its start to its end, and what is waited for from it.

    Attributes:
        link: where it is spoken to.
        ready: what it says when the model is loaded, or why it cannot be.
        was_ready: whether it said so.
        error: why it cannot be started, as it says.
        answers: to `Submit` and `AskMetrics`, by id.
        replies: accepted requests by id.
    """

    process: EngineProcess
    link: Link
    ready: asyncio.Future[Ready]
    was_ready: bool = False
    error: Exception | None = None
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    replies: dict[int, ClientReply] = field(default_factory=dict)

    def hear(self, message: Answer | Event) -> None:
        """Pass on what concerns one request; nobody may wait for it any more."""
        if message.id is None:
            return
        answer, reply = self.answers.get(message.id), self.replies.get(message.id)
        if isinstance(message, Answer):
            self.answers.pop(message.id, None)
        if answer is not None and not answer.done():
            if isinstance(message, Failed):
                answer.set_exception(raised(message))
            elif isinstance(message, Accepted | MetricsAnswer):
                answer.set_result(message)
        elif reply is not None and not isinstance(message, Accepted | MetricsAnswer):
            reply.hear(raised(message) if isinstance(message, Failed) else message)
        if isinstance(message, Failed | Done):
            self.replies.pop(message.id, None)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        for answer in [self.ready, *self.answers.values()]:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # whoever waits for it has left, perhaps: no complaint then
        for reply in self.replies.values():
            reply.hear(error)
        self.replies.clear()


class EngineClient:
    """See `service.EngineService`.

    Args:
        launch: starts an engine at the other end of a socket.
        opening: what to tell it first.
        loading: called with how far loading has come.
        restart_delays_s: before each attempt to start it again; None never does.
        sleep: waits so long.
    """

    def __init__(
        self,
        launch: Launch,
        opening: Callable[[], Open],
        *,
        loading: Callable[[Loading], None] = lambda _loading: None,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._launch, self._opening, self._loading = launch, opening, loading
        self._delays, self._sleep = restart_delays_s, sleep
        self._numbers = count()
        self._connection: Connection | None = None
        self._life: asyncio.Task[None] | None = None
        self._health = Health.STARTING
        self._failure: Exception | None = None
        self._ready: Ready | None = None

    @property
    def health(self) -> Health:
        """See `service.EngineService.health`."""
        return self._health

    @property
    def failure(self) -> Exception | None:
        """See `service.EngineService.failure`."""
        return self._failure

    @property
    def ready(self) -> Ready | None:
        """See `service.EngineService.ready`."""
        return self._ready

    @property
    def num_in_flight(self) -> int:
        """See `service.EngineService.num_in_flight`."""
        return 0 if self._connection is None else len(self._connection.replies)

    async def start(self) -> Ready:
        """See `service.EngineService.start`."""
        connection = await self._open()
        self._life = asyncio.create_task(self._live(connection))
        return await asyncio.shield(connection.ready)

    async def submit(self, request: GenerateRequest) -> ClientReply:
        """See `service.EngineService.submit`."""
        connection, id = self._running(), next(self._numbers)
        framed = frame(Submit(id=id, request=request))  # first: it may be refused
        reply = ClientReply(self, id, request.params)
        connection.replies[id] = reply
        answer = connection.answers[id] = asyncio.get_running_loop().create_future()
        connection.link.send(framed)
        try:
            accepted: Accepted = await answer
        except asyncio.CancelledError:
            reply.cancel()
            raise
        reply.params = accepted.params
        return reply

    async def metrics(self) -> Metrics:
        """See `service.EngineService.metrics`."""
        connection, id = self._running(), next(self._numbers)
        answer = connection.answers[id] = asyncio.get_running_loop().create_future()
        connection.link.write(AskMetrics(id=id))
        found: MetricsAnswer = await answer
        return found.metrics

    async def close(self, drain_s: float = 0.0) -> None:
        """See `service.EngineService.close`."""
        self._health = Health.CLOSING
        connection, life = self._connection, self._life
        if connection is None or life is None:
            return
        if not connection.ready.done():
            connection.process.kill()
        if drain_s:
            connection.link.write(Shutdown())
            await asyncio.wait([life], timeout=drain_s)
        connection.link.write(Shutdown(at_once=True))
        await asyncio.wait([life], timeout=_END_S)
        connection.process.kill()
        await asyncio.wait([life])

    def say(self, id: int, message: Message) -> None:
        """Send something about a request that is in flight; nothing if it is not any more."""
        if self._connection is not None and id in self._connection.replies:
            self._connection.link.write(message)

    def _running(self) -> Connection:
        if self._health is Health.CLOSING:
            raise ShuttingDownError("the server is shutting down: ask another, or later")
        if self._connection is None or self._health is not Health.READY:
            why = f" ({self._failure})" if self._failure else ""
            raise EngineDiedError(f"the engine is {self._health}{why}: ask again later")
        return self._connection

    async def _open(self) -> Connection:
        """Start a process and say what to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await self._launch(theirs)
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

        def heard(message: ToClient) -> None:
            self._hear(connection, message)

        _, link = await asyncio.get_running_loop().create_connection(lambda: Link(heard), sock=ours)
        connection = self._connection = Connection(process, link, ready)
        link.write(self._opening())
        return connection

    async def _live(self, connection: Connection) -> None:
        """Listen to one process after the other; whoever ends is started again."""
        delays = iter(self._delays)
        while True:
            error = await self._listen(connection)
            if self._health is Health.CLOSING:
                return
            if connection.was_ready:
                delays = iter(self._delays)
            delay = next(delays, None) if self._ready is not None else None
            self._failure = error
            self._health = Health.FAILED if delay is None else Health.STARTING
            if delay is None:
                self._lost("and is not started again")
                return
            self._lost(f"and is started again{f' in {delay:g} s' if delay else ''}")
            await self._sleep(delay)
            connection = await self._open()

    def _lost(self, then: str) -> None:
        """Log why an engine that had been ready is gone; `start` raises for one that never was."""
        if self._ready is not None:
            _log.warning("the engine is lost (%s) %s", self._failure, then)

    async def _listen(self, connection: Connection) -> Exception:
        """Until a process has ended; return why."""
        await connection.link.gone
        how = await self._ended(connection.process)
        error = connection.error or EngineDiedError(f"the engine's process {how}")
        connection.fail(error)
        return error

    def _hear(self, connection: Connection, message: ToClient) -> None:
        if isinstance(message, Ready):
            connection.was_ready = True
            if self._failure is not None:
                _log.warning("the engine is ready again")
            connection.ready.set_result(message)
            self._ready, self._failure = message, None
            self._health = Health.READY if self._health is not Health.CLOSING else self._health
        elif isinstance(message, Loading):
            self._loading(message)
        elif isinstance(message, Planned):
            pass  # of an engine that only plans, which `engine_plan` asks
        elif isinstance(message, Failed) and message.id is None:
            connection.error = raised(message)
        else:
            connection.hear(message)

    @staticmethod
    async def _ended(process: EngineProcess) -> str:
        """How a process has ended; one that hangs is killed."""
        try:
            return await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            return await process.wait()
