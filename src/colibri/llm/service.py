"""An engine in a process of its own, for whoever serves many clients at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO

from colibri.engine.child import ending, launcher
from colibri.engine.client import EngineClient
from colibri.engine.messages import (
    LENGTH,
    Failed,
    Loading,
    Open,
    Planned,
    ToClient,
    frame,
    raised,
    to_client,
)
from colibri.errors import EngineDiedError
from colibri.memory.budget import process_rss
from colibri.models.plan import Plan
from colibri.settings import Settings

MODULE = "colibri.llm.engine_process"


def engine_service(
    settings: Settings, loading: Callable[[Loading], None] = lambda _loading: None
) -> EngineClient:
    """The client of an engine that will be started with these settings.

    `ram` bounds both processes together: this one counts as what it occupies when the engine is
    started.
    """
    return EngineClient(launcher(MODULE), lambda: _opening(settings), loading=loading)


def _opening(settings: Settings, *, only_plan: bool = False) -> Open:
    given = {k: v for k, v in settings.as_dict().items() if v != DEFAULTS[k]}
    return Open(settings=given, client_bytes=process_rss(), only_plan=only_plan)


def engine_plan(settings: Settings) -> Plan:
    """How an engine of this process would divide memory, by its own account.

    Raises:
        CheckpointError, BudgetError, …: why it could not be started, as its type.
        EngineDiedError: it said nothing.
    """
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-m", MODULE, str(its.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        its.close()
        ours.sendall(frame(_opening(settings, only_plan=True)))
        with ours.makefile("rb") as told:
            answer = _last(told)
    process.wait()
    match answer:
        case Planned():
            return Plan(**{**answer.plan, "slots": tuple(answer.plan["slots"])})
        case Failed():
            raise raised(answer)
    raise EngineDiedError(f"the engine's process {ending(process.returncode)}")


def _last(told: BinaryIO) -> ToClient | None:
    """The last message of an engine that ends."""
    last: ToClient | None = None
    while len(head := told.read(LENGTH.size)) == LENGTH.size:
        last = to_client(told.read(*LENGTH.unpack(head)))
    return last


DEFAULTS = Settings().as_dict()
