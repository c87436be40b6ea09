"""Answers that come piece by piece: server-sent events, or a JSON object a line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

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
        async for piece in self._safe():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _safe(self) -> Pieces:
        pieces = _with_signs_of_life(self._pieces, self._alive, self._quiet_s)
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    yield piece
            except Exception as error:  # the status is sent: the stream itself must tell
                yield self._failure(problem_of(error))


async def _with_signs_of_life(
    pieces: Pieces, alive: bytes, quiet_s: float
) -> AsyncGenerator[bytes, None]:
    following: asyncio.Task[bytes] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(_next(pieces))
            done, _ = await asyncio.wait({following}, timeout=quiet_s)
            if not done:
                if alive:
                    yield alive
                continue
            try:
                piece = following.result()
            except StopAsyncIteration:
                return
            finally:
                following = None
            yield piece
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})


async def _next(pieces: Pieces) -> bytes:
    return await anext(pieces)


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else dumps(data)
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {text}\n\n".encode()


def progress(done: int, total: int) -> bytes:
    """A comment, which clients skip: how much of the prompt has been read."""
    return f": prompt {done}/{total}\n\n".encode()


def line(data: Any) -> bytes:
    """One line of JSON."""
    return f"{dumps(data)}\n".encode()


def dumps(data: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


SSE_ALIVE = b": still here\n\n"
SSE_TYPE = "text/event-stream; charset=utf-8"
LINES_TYPE = "application/x-ndjson"
