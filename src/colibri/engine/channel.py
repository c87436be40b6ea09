"""Frames over a socket, for an engine's process: it reads in a thread and writes when it likes."""

from __future__ import annotations

import contextlib
import socket

from colibri.engine.messages import LENGTH, MAX_BODY_BYTES, Message, ToEngine, frame, to_engine
from colibri.errors import RequestError


class Channel:
    """One end of a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._pending = bytearray()

    def receive(self) -> ToEngine | None:
        """The next message; None once the other end has gone.

        Raises:
            RequestError: what comes is no message.
        """
        try:
            head = self._reader.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            (size,) = LENGTH.unpack(head)
            if size > MAX_BODY_BYTES:
                raise RequestError(f"a message of {size} bytes: at most {MAX_BODY_BYTES} are read")
            body = self._reader.read(size)
        except OSError:
            return None
        return None if len(body) < size else to_engine(body)

    def write(self, message: Message) -> None:
        """Put a message behind those that wait for `flush`."""
        self._pending += frame(message)

    def flush(self) -> bool:
        """Send what waits, in one piece; False once the other end has gone."""
        if not self._pending:
            return True
        data, self._pending = self._pending, bytearray()
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End both directions, so that `receive` returns wherever it waits."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self._socket.close()
