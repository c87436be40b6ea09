"""The engine's side of the boundary: a process, or a thread, that serves one client."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from colibri.engine.channel import Channel
from colibri.engine.engine import Engine
from colibri.engine.messages import (
    Accepted,
    AskMetrics,
    Cancel,
    Done,
    Event,
    Loading,
    MetricsAnswer,
    Open,
    Planned,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    failed,
)
from colibri.engine.task import Listener, Task
from colibri.errors import Cancelled, ColibriError, RequestError, ShuttingDownError


class Loaded(NamedTuple):
    """What is there once an engine is loaded.

    Attributes:
        plan: where every byte of its memory goes.
        rests: called when nothing is to be done, after something was.
    """

    engine: Engine
    plan: dict[str, Any]
    rests: Callable[[], None] = lambda: None


Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total
OpenEngine: TypeAlias = Callable[[Open, Progress], AbstractContextManager[Loaded]]
PlanEngine: TypeAlias = Callable[[Open, Progress], dict[str, Any]]


def serve(
    connection: socket.socket, open_engine: OpenEngine, plan_engine: PlanEngine | None = None
) -> None:
    """Load what the client's first message says, then work for it until it says so or goes.

    `open_engine` loads, `plan_engine` says how memory would be divided; what they raise is told to
    the client.
    """
    channel = Channel(connection)
    try:
        first = channel.receive()
        if isinstance(first, Open):
            _serve(channel, first, open_engine, plan_engine)
    finally:
        channel.close()


def _serve(
    channel: Channel, first: Open, open_engine: OpenEngine, plan_engine: PlanEngine | None
) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        channel.write(Loading(stage=stage, done=done, total=total))
        if not channel.flush():
            raise Cancelled("nobody waits for this engine any more")

    try:
        if first.only_plan and plan_engine is not None:
            channel.write(Planned(plan=plan_engine(first, progress)))
            channel.flush()
            return
        with open_engine(first, progress) as loaded:
            channel.write(_ready(loaded))
            Worker(loaded, channel).run()
    except ColibriError as error:
        channel.write(failed(error, None))
        channel.flush()


def _ready(loaded: Loaded) -> Ready:
    limits = loaded.engine.limits
    return Ready(
        pid=os.getpid(),
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        max_context_length=limits.max_context_length,
        eos_ids=tuple(sorted(limits.eos_ids)),
        max_sessions=limits.max_sessions,
        max_waiting=limits.max_waiting,
        lossy=limits.lossy,
        plan=loaded.plan,
    )


class Worker:
    """Runs passes; between two it takes messages, between two layers it heeds cancels.

    A thread reads: it sleeps in the socket, so that it costs nothing while nothing comes.
    """

    def __init__(self, loaded: Loaded, channel: Channel) -> None:
        self._engine, self._rests, self._channel = loaded.engine, loaded.rests, channel
        self._messages: SimpleQueue[ToEngine | None] = SimpleQueue()  # None: look at the others
        self._cancels: deque[Cancel] = deque()
        self._gone = False  # the client; or it wants everything to end at once
        self._closing = False
        self._tasks: dict[int, Task] = {}
        self._handlers: dict[type[ToEngine], Callable[[Any], None]] = {
            Submit: self._submit,
            AskMetrics: self._answer,
            Shutdown: self._shut_down,
        }

    def run(self) -> None:
        """Until the client is gone, or has asked to shut down and nothing runs any more."""
        reader = threading.Thread(target=self._read, name="colibri-messages", daemon=True)
        reader.start()
        busy = False
        while not self._gone and not (self._closing and not self._tasks):
            self._take_messages(wait=not busy)
            worked, busy = busy, self._engine.step(self._between_layers)
            self._flush()
            if worked and not busy:
                self._rests()
        for task in list(self._tasks.values()):
            self._engine.cancel(task)
        self._flush()

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (RequestError, ValueError):  # no message at all; or closed on our side
                message = None
            if message is None or (isinstance(message, Shutdown) and message.at_once):
                self._gone = True
            elif isinstance(message, Cancel):
                self._cancels.append(message)
                message = None
            self._messages.put(message)
            if self._gone:
                return

    def _take_messages(self, wait: bool) -> None:
        """Do what has come; where there is nothing to do, wait for more."""
        self._flush()
        while wait or not self._messages.empty():
            wait = False
            message = self._messages.get()
            if message is not None:
                self._handlers.get(type(message), _ignore)(message)
        self._heed_cancels(known_only=False)
        self._flush()

    def _between_layers(self) -> None:
        if self._gone:
            for task in list(self._tasks.values()):
                self._engine.cancel(task)
        elif self._cancels:
            self._heed_cancels(known_only=True)
            self._flush()

    def _heed_cancels(self, known_only: bool) -> None:
        """Requests that are not known have ended, or are still among the messages."""
        for _ in range(len(self._cancels)):
            cancel = self._cancels.popleft()
            task = self._tasks.get(cancel.id)
            if task is not None:
                self._engine.cancel(task, cancel.choice, cancel.reason)
            elif known_only:
                self._cancels.append(cancel)

    def _submit(self, message: Submit) -> None:
        told: list[Event] = []  # nothing is told before the request is accepted
        accepted = False

        def tell(event: Event) -> None:
            told.append(event)
            if accepted:
                self._tell(told)

        def fail(error: Exception) -> None:
            self._tasks.pop(message.id, None)
            self._channel.write(failed(error, message.id))

        try:
            if self._closing:
                raise ShuttingDownError("the engine is shutting down: ask another, or later")
            task = self._engine.submit(message.request, Listener(tell, fail), id=message.id)
        except ColibriError as error:
            self._channel.write(failed(error, message.id))
            return
        self._tasks[message.id] = task
        self._channel.write(Accepted(id=message.id, params=task.request.params))
        accepted = True
        self._tell(told)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self._channel.write(event)
            if isinstance(event, Done):
                del self._tasks[event.id]
        events.clear()

    def _answer(self, message: AskMetrics) -> None:
        self._channel.write(MetricsAnswer(id=message.id, metrics=self._engine.metrics()))

    def _shut_down(self, _message: Shutdown) -> None:
        self._closing = True

    def _flush(self) -> None:
        self._gone |= not self._channel.flush()


def _ignore(message: object) -> None:
    """A second `Open` says nothing."""
