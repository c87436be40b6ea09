"""Engines in threads, at the other end of a client's socket: "processes" that tests look into."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from colibri.engine.channel import Channel
from colibri.engine.client import EngineClient
from colibri.engine.engine import Engine
from colibri.engine.messages import Event, Open, ToEngine, Tokens
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.worker import Loaded, Progress, serve
from tests.unit.engine.counter import CounterModel, make_engine

GREEDY = SamplingParams(max_tokens=4)


class Machine:
    """Starts engines in threads, over models that tests look into.

    Attributes:
        models: one for each start.
        before_layer: called with pass and layer.
        opened: what each was told first.
        rests: how often there was nothing left to do.
        refusals: errors that loading ends with, one for each start.
    """

    def __init__(self, **limits: Any) -> None:
        self.models: list[CounterModel] = []
        self.before_layer: Callable[[int, int], None] = lambda _pass, _layer: None
        self.refusals: list[Exception | None] = []
        self.opened: list[Open] = []
        self.rests = 0
        self._limits = {"max_sessions": 4} | limits

    @contextmanager
    def open_engine(self, opening: Open, progress: Progress) -> Iterator[Loaded]:
        self.opened.append(opening)
        progress("weights", 1, 2)
        if self.refusals and (error := self.refusals.pop(0)) is not None:
            raise error
        model = CounterModel(24)
        model.before_layer = lambda *at: self.before_layer(*at)
        self.models.append(model)
        engine: Engine = make_engine(model, **self._limits)
        yield Loaded(engine, {"slots": 3}, self._rests)
        engine.close()

    def _rests(self) -> None:
        self.rests += 1

    async def launch(self, connection: socket.socket) -> Thread:
        return Thread(connection.dup(), self.open_engine)


class CountingChannel(Channel):
    """Counts the messages that were dealt with."""

    handled = -1  # of the newest one
    changed = threading.Condition()

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        CountingChannel.handled = -1

    def receive(self) -> ToEngine | None:
        """Whoever asks for the next has put the last one aside."""
        with self.changed:
            CountingChannel.handled += 1
            self.changed.notify_all()
        return super().receive()


async def handled(messages: int) -> None:
    """Wait until the engine has so many messages, the first among them."""

    def wait() -> None:
        with CountingChannel.changed:
            CountingChannel.changed.wait_for(lambda: CountingChannel.handled >= messages)

    await asyncio.to_thread(wait)


class Thread:
    """An engine's "process"."""

    def __init__(self, connection: socket.socket, open_engine: Any) -> None:
        self._connection = connection
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                serve(connection, open_engine)
            except Crash:
                pass
            finally:
                loop.call_soon_threadsafe(self._ended.set)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    async def wait(self) -> str:
        await self._ended.wait()
        self.thread.join()
        return "has ended"

    def kill(self) -> None:
        if not self._ended.is_set():
            self._connection.shutdown(socket.SHUT_RDWR)


class Crash(BaseException):
    """The process ends here and now."""


@asynccontextmanager
async def running(machine: Machine, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(machine.launch, lambda: Open(settings={"ram": 5}), **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def in_a_loop(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in an event loop, and ends."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(coroutine(), 60))

    run.__name__ = coroutine.__name__
    return run


def request(*prompt: int, **more: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **{"params": GREEDY} | more)


async def heard(client: EngineClient, asked: GenerateRequest) -> list[Event]:
    async with await client.submit(asked) as reply:
        return [event async for event in reply]


def tokens(events: list[Event], choice: int = 0) -> list[int]:
    found = [e.token_ids for e in events if isinstance(e, Tokens) and e.choice == choice]
    return [token for ids in found for token in ids]


class Gate:
    """Holds a pass at a layer until somebody opens."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.number = number
        self.reached, self.opened = threading.Event(), threading.Event()
        machine.before_layer = self._before

    def _before(self, number: int, layer: int) -> None:
        if (number, layer) == (self.number, 1):
            self.reached.set()
            self.opened.wait()

    async def wait(self) -> None:
        await asyncio.to_thread(self.reached.wait)
