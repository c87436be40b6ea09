"""The client's end of the socket: frames are taken apart as they come, inside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from colibri.engine.messages import LENGTH, MAX_BODY_BYTES, Message, ToClient, frame, to_client
from colibri.errors import RequestError


class Link(asyncio.Protocol):
    """Tells of each message in the callback that brings it: no task has to wake for one.

    Args:
        heard: called with every message.

    Attributes:
        gone: done once the other end has gone, or has sent what is no message.
    """

    def __init__(self, heard: Callable[[ToClient], None]) -> None:
        self._heard = heard
        self._pending = b""
        self._transport: asyncio.Transport | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`: one message, several, or part of one."""
        data = self._pending + data
        start = 0
        while (end := _end_of_frame(data, start)) <= len(data):
            try:
                message = to_client(data[start + LENGTH.size : end])
            except RequestError:
                self.close()
                return
            start = end
            self._heard(message)
        self._pending = data[start:]
        if end - start > LENGTH.size + MAX_BODY_BYTES:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self.gone.done():
            self.gone.set_result(None)

    def send(self, framed: bytes) -> None:
        """Send, or do nothing where the other end has gone: `gone` says so."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed)

    def write(self, message: Message) -> None:
        """The same for a message that is not framed yet."""
        self.send(frame(message))

    def close(self) -> None:
        """Hear no more."""
        if self._transport is not None:
            self._transport.abort()


def _end_of_frame(data: bytes, start: int) -> int:
    """Where the frame that begins at `start` ends; behind `data` where its length is not known."""
    if len(data) - start < LENGTH.size:
        return len(data) + 1
    (size,) = LENGTH.unpack_from(data, start)
    return start + LENGTH.size + int(size)
