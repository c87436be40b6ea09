"""A process for an engine, started with one end of a socket."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

from colibri.engine.client import Launch


class ChildProcess:
    """See `client.EngineProcess`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> str:
        """See `client.EngineProcess.wait`."""
        return ending(await self._process.wait())

    def kill(self) -> None:
        """See `client.EngineProcess.kill`."""
        if self._process.returncode is None:
            self._process.kill()


def ending(status: int) -> str:
    """How a process has ended, from its return code."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def launcher(module: str, arguments: Sequence[str] = ()) -> Launch:
    """Starts `python -m module FD arguments…`, where FD is the number of the socket.

    It has a session of its own: Ctrl-C at the terminal is for the client, which says when to end.
    """

    async def launch(connection: socket.socket) -> ChildProcess:
        number = connection.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(number), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,
        )
        return ChildProcess(process)

    return launch
