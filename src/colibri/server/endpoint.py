"""An HTTP request from its first byte to its last: body, disconnects, errors before and within."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colibri.server.problems import Problem, problem_of
from colibri.server.serving import Call, Handler, Serving

Envelope = Callable[[Problem], dict[str, Any]]
"""How an API spells a problem."""

_log = logging.getLogger("colibri.server")


class Endpoint:
    """Serves one path.

    While the handler works and while its answer is sent, the connection is watched: a client that
    leaves, at whatever moment, cancels the task, and with it what the engine computes for it.
    """

    def __init__(self, path: str, serving: Serving, handler: Handler, envelope: Envelope) -> None:
        """`path` is what answers are counted under: as it is declared, not as it was asked."""
        self._path = path
        self._serving = serving
        self._handler = handler
        self._envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        counters = self._serving.counters
        counters.in_flight += 1
        outcome = _Outcome(send, self._serving.limits.send_s)
        try:
            await self._answer(scope, receive, outcome)
        finally:
            counters.in_flight -= 1
            counters.answers[self._path, outcome.status] += 1

    async def _answer(self, scope: Scope, receive: Receive, send: _Outcome) -> None:
        try:
            body = await self._body(scope, receive)
        except Problem as problem:
            await self._refusal(problem)(scope, receive, send)
            return
        except _Left:
            self._left(scope)
            return
        work = asyncio.create_task(self._work(scope, body, send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            with send.patiently(work):
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if send.is_stuck or not work.done():
                self._left(scope)
        finally:
            watch.cancel()
            await _ended(work)

    def _left(self, scope: Scope) -> None:
        self._serving.counters.disconnects += 1
        _log.debug("the client of %s has left", scope["path"])

    async def _work(self, scope: Scope, body: bytes, send: _Outcome) -> None:
        async with AsyncExitStack() as stack:
            call = Call(self._serving, Request(scope), body, stack)
            try:
                response = await self._handler(call)
            except Exception as error:
                response = self._refusal(problem_of(error))
            await response(scope, _never, send)

    def _refusal(self, problem: Problem) -> ASGIApp:
        return JSONResponse(self._envelope(problem), problem.status, dict(problem.headers))

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limits = self._serving.limits
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limits.max_body_bytes:
            raise _too_large(limits.max_body_bytes)
        try:
            async with asyncio.timeout(limits.body_s):
                return await _read(receive, limits.max_body_bytes)
        except TimeoutError:
            message = f"the body has not arrived in {limits.body_s:g} s"
            raise Problem(408, message, None, "timeout") from None


class _Left(Exception):  # noqa: N818  (no error: the client's right)
    """The client has left."""


class _Outcome:
    """Sends, and remembers with what status; a client that takes nothing is given up.

    Attributes:
        status: 499 before anything is sent, as other servers log clients that left by then.
        is_stuck: whether the client was given up.
    """

    def __init__(self, send: Send, patience_s: float) -> None:
        self._send = send
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._num_sending, self._since = 0, 0.0
        self.status = 499
        self.is_stuck = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if not self._num_sending:
            self._since = self._clock()
        self._num_sending += 1
        try:
            await self._send(message)
        finally:
            self._num_sending -= 1

    @contextmanager
    def patiently(self, work: asyncio.Task[None]) -> Iterator[None]:
        """Cancel the work once something has waited too long for the client to take it."""
        watch = asyncio.create_task(self._look(work))
        try:
            yield
        finally:
            watch.cancel()

    async def _look(self, work: asyncio.Task[None]) -> None:
        left = self._patience_s
        while left > 0:
            await asyncio.sleep(left)
            left = self._patience_s
            left -= self._clock() - self._since if self._num_sending else 0
        self.is_stuck = True
        work.cancel()


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit:,} bytes", None, "body_too_large")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Message:
    """What an answer may receive: nothing, the connection is watched already."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def _ended(work: asyncio.Task[None]) -> None:
    """Cancel the work where it is not done, and wait until it has given everything back."""
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
