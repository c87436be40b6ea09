"""Answers that come piece by piece: server-sent events, or a JSON object a line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import msgspec
from starlette.types import Receive, Scope, Send

from colibri.server.problems import Problem, problem_of

Pieces = AsyncIterator[bytes]


class Stream:
    """A response made of pieces.

    An error after the first piece becomes a piece of its own: the status has been sent. Where there
    is nothing to tell for a while, `alive` is sent, so that nobody in between hangs up.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        media_type: str,
        failure: Callable[[Problem], bytes],
        alive: bytes = b"",
        quiet_s: float = 15.0,
    ) -> None:
        self._pieces = pieces
        self._media_type = media_type
        self._failure = failure
        self._alive = alive
        self._quiet_s = quiet_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        headers = [
            (b"content-type", self._media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with _SignsOfLife(send, self._alive, self._quiet_s) as sender:
            async for piece in self._safe():
                await sender.send(piece)
        await send({"type": "http.response.body", "body": b""})

    async def _safe(self) -> Pieces:
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:  # the status is sent: the stream itself must tell
            yield self._failure(problem_of(error))


class _SignsOfLife:
    """Sends pieces, and `alive` where none has come for `quiet_s` seconds.

    One task looks now and then, however many pieces there are: they come once a token.
    """

    def __init__(self, send: Send, alive: bytes, quiet_s: float) -> None:
        self._send, self._alive, self._quiet_s = send, alive, quiet_s
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._is_sending = False
        self._watch: asyncio.Task[None] | None = None

    async def send(self, piece: bytes) -> None:
        """Send a piece."""
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._is_sending, self._last = False, self._clock()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._last + self._quiet_s - self._clock())
            quiet = self._clock() - self._last >= self._quiet_s
            if quiet and self._is_sending:  # the client is slow: it has enough to take
                self._last = self._clock()
            elif quiet:
                await self.send(self._alive)

    async def __aenter__(self) -> Self:
        if self._alive:
            self._watch = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data.encode() if isinstance(data, str) else _encode(data)
    head = b"" if event is None else b"event: %b\n" % event.encode()
    return b"%bdata: %b\n\n" % (head, text)


def progress(done: int, total: int) -> bytes:
    """A comment, which clients skip: how much of the prompt has been read."""
    return f": prompt {done}/{total}\n\n".encode()


def line(data: Any) -> bytes:
    """One line of JSON."""
    return _encode(data) + b"\n"


_encode = msgspec.json.Encoder().encode
SSE_ALIVE = b": still here\n\n"
SSE_TYPE = "text/event-stream; charset=utf-8"
LINES_TYPE = "application/x-ndjson"
