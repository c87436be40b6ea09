"""The server's life: the engine and HTTP start together, and end in order."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from colibri.engine.messages import Ready
from colibri.errors import SettingsError
from colibri.server.app import create_app
from colibri.server.serving import Serving

_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 30
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where the server listens.

    Attributes:
        host: an address or a name.
        port: 0 takes a free one.
        max_connections: more are refused with 503.
        drain_s: how long running requests may take to end when the server is stopped.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_connections: int = 512
    drain_s: float = 10.0


class Server(uvicorn.Server):
    """Stops the engine first: it refuses new requests while running ones end."""

    def __init__(self, serving: Serving, binding: Binding) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(serving),
                host=binding.host,
                port=binding.port,
                lifespan="off",
                ws="none",
                http="h11",
                loop="asyncio",
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=binding.max_connections,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(binding.drain_s)),
                h11_max_incomplete_event_size=_HEADER_BYTES,
            )
        )
        self._engine = serving.engine
        self._drain_s = binding.drain_s
        self.listening = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        found = self.servers[0].sockets[0].getsockname()
        return found[0], found[1]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stop the server, and that is all they do: what follows ends in order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end, refuse others, and stop."""
        closing = asyncio.create_task(self._engine.close(self._drain_s))
        await super().shutdown(sockets)
        await closing


def bound(binding: Binding) -> list[socket.socket]:
    """Sockets at every address of the host, before anything is loaded.

    Raises:
        SettingsError: the host has no address here, or the port is taken or not allowed.
    """
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    found: list[socket.socket] = []
    missing: OSError | None = None
    try:
        known = socket.getaddrinfo(binding.host, binding.port, type=kind, flags=flags)
        for family, address in dict.fromkeys((one[0], one[4]) for one in known):
            try:
                found.append(socket.create_server(address, family=family))
            except OSError as error:  # a name may have addresses of a kind that is switched off
                if error.errno not in _NO_ADDRESS:
                    raise
                missing = error
        if missing is not None and not found:
            raise missing
    except (OSError, UnicodeError) as error:
        for one in found:
            one.close()
        raise SettingsError(_not_bound(binding, error)) from error
    return found


def _not_bound(binding: Binding, error: OSError | UnicodeError) -> str:
    """Why, and which of the two settings to change."""
    number = error.errno or 0 if isinstance(error, OSError) else 0
    why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    if number in (errno.EADDRINUSE, errno.EACCES):
        return (
            f"port {binding.port} of {binding.host} cannot be listened on ({why}): set port to "
            "another; 0 takes a free one"
        )
    return (
        f"host {binding.host} is no address of this machine ({why}): set host to one, such as "
        "127.0.0.1"
    )


async def run(
    serving: Serving,
    binding: Binding,
    *,
    on_listening: Callable[[str, int], None] = lambda host, port: None,
    on_ready: Callable[[Ready], None] = lambda ready: None,
) -> None:
    """Serve until a signal says stop; HTTP answers while the model is still being loaded.

    Raises:
        CheckpointError, BudgetError, …: why the engine cannot be started, as its type.
        SettingsError: the address cannot be bound; nothing has been started then.
    """
    sockets = bound(binding)
    server = Server(serving, binding)
    starting = asyncio.create_task(serving.engine.start())
    running = asyncio.create_task(server.serve(sockets))
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if server.listening.is_set():
            on_listening(*server.address)
            await asyncio.wait({starting, running}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not server.should_exit:  # or it was stopped while loading
                on_ready(starting.result())
    except (Exception, asyncio.CancelledError):  # cancelled: by Ctrl-C before it is the server's
        server.should_exit = True
        raise
    finally:
        await running
        for task in (listening, starting):
            task.cancel()
        await asyncio.gather(listening, starting, return_exceptions=True)
