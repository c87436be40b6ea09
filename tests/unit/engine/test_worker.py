"""The boundary of the engine's process: a client on one end of a socket, an engine in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from colibri.engine.channel import Channel
from colibri.engine.client import EngineClient
from colibri.engine.engine import Engine
from colibri.engine.messages import (
    Done,
    Event,
    Finished,
    Loading,
    Open,
    Prefill,
    Started,
    ToEngine,
    Tokens,
)
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.engine.service import EngineService, Health
from colibri.engine.worker import Loaded, Progress, serve
from colibri.errors import (
    BudgetError,
    BusyError,
    ContextLengthError,
    EngineDiedError,
    RequestError,
    ShuttingDownError,
)
from tests.unit.engine.counter import CounterModel, make_engine

GREEDY = SamplingParams(max_tokens=4)


class Machine:
    """Starts engines in threads, over models that tests look into.

    Attributes:
        models: one for each start.
        before_layer: called with pass and layer.
        opened: what each was told first.
        refusals: errors that loading ends with, one for each start.
    """

    def __init__(self, **limits: Any) -> None:
        self.models: list[CounterModel] = []
        self.before_layer: Callable[[int, int], None] = lambda _pass, _layer: None
        self.refusals: list[Exception | None] = []
        self.opened: list[Open] = []
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
        yield Loaded(engine, {"slots": 3})
        engine.close()

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


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri.engine.worker.Channel", CountingChannel)


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


@in_a_loop
async def test_a_request_from_start_to_end() -> None:
    seen: list[Loading] = []
    machine = Machine()
    async with running(machine, loading=seen.append) as client:
        _: EngineService = client
        assert client.ready is not None
        assert (client.ready.plan, client.ready.max_sessions) == ({"slots": 3}, 4)
        assert client.health is Health.READY
        async with await client.submit(request(5, 6, n=2, top_logprobs=1)) as reply:
            assert reply.params.max_tokens == 4
            assert client.num_in_flight == 1
            events = [event async for event in reply]
        assert client.num_in_flight == 0
        assert tokens(events) == tokens(events, 1) == [7, 8, 9, 10]
        first, *_, last = events
        assert isinstance(first, Started)
        assert isinstance(last, Done)
        assert last.metrics.completion_tokens == 8
        assert sum(isinstance(event, Finished) for event in events) == 2
        assert sum(isinstance(event, Prefill) for event in events) == 2
        assert (await client.metrics()).num_requests == 1
    assert (seen[0].stage, machine.opened[0].settings) == ("weights", {"ram": 5})
    assert client.health is Health.CLOSING


@in_a_loop
async def test_requests_run_together() -> None:
    machine = Machine()
    async with running(machine) as client:
        every = await asyncio.gather(*(heard(client, request(n)) for n in range(12)))
        assert [tokens(events) for events in every] == [
            [n + 1, n + 2, n + 3, n + 4] for n in range(12)
        ]


@in_a_loop
async def test_what_cannot_be_honoured_is_refused_before_anything_comes() -> None:
    async with running(Machine()) as client:
        with pytest.raises(RequestError, match=r"prompt\[0\] is 9999"):
            await client.submit(request(9999))
        with pytest.raises(ContextLengthError, match="1,000 tokens"):
            await client.submit(request(*[1] * 1000))
        assert client.num_in_flight == 0
        assert tokens(await heard(client, request(1))) == [2, 3, 4, 5]


@in_a_loop
async def test_nothing_is_computed_for_no_tokens() -> None:
    async with running(Machine()) as client:
        events = await heard(client, request(1, params=SamplingParams(max_tokens=0)))
        assert [type(event) for event in events] == [Finished, Done]


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


@in_a_loop
async def test_cancelling_frees_the_engine_between_two_layers() -> None:
    machine = Machine()
    gate = Gate(machine, 1)
    async with running(machine) as client:
        reply = await client.submit(request(*range(16)))
        await gate.wait()
        reply.cancel(reason=FinishReason.STOP)
        await handled(3)
        gate.opened.set()
        events = [event async for event in reply]
        assert tokens(events) == []
        assert [e.reason for e in events if isinstance(e, Finished)] == [FinishReason.STOP]
        assert tokens(await heard(client, request(1))) == [2, 3, 4, 5]
        reply.cancel()  # it has ended: nothing happens


@in_a_loop
async def test_leaving_early_cancels() -> None:
    machine = Machine(context_length=1024)
    async with running(machine) as client:
        for _ in range(20):
            async with await client.submit(request(1, params=SamplingParams())) as reply:
                async for event in reply:
                    if isinstance(event, Tokens):
                        break
        assert tokens(await heard(client, request(1))) == [2, 3, 4, 5]
        while client.num_in_flight:
            await client.metrics()
        assert (await client.metrics()).num_running == 0


@in_a_loop
async def test_one_reply_of_several_is_cancelled() -> None:
    machine = Machine()
    gate = Gate(machine, 3)
    async with running(machine) as client:
        reply = await client.submit(request(1, n=2))
        await gate.wait()
        reply.cancel(1, FinishReason.STOP)
        await handled(3)
        gate.opened.set()
        events = [event async for event in reply]
        assert tokens(events) == [2, 3, 4, 5]
        assert tokens(events, 1) == [2]
        reasons = {e.choice: e.reason for e in events if isinstance(e, Finished)}
        assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.STOP}


@in_a_loop
async def test_a_full_queue_says_when_to_come_back() -> None:
    machine = Machine(max_sessions=1, max_waiting=1)
    gate = Gate(machine, 1)
    async with running(machine) as client:
        first = await client.submit(request(1))
        await gate.wait()
        others = [asyncio.create_task(client.submit(request(n))) for n in (2, 3)]
        await handled(4)
        gate.opened.set()
        second = await others[0]
        with pytest.raises(BusyError, match="wait already") as error:
            await others[1]
        assert error.value.retry_after_s >= 1
        for reply in (first, second):
            assert len(tokens([event async for event in reply])) == 4


@in_a_loop
async def test_an_error_reaches_whom_it_concerns_with_its_type() -> None:
    machine = Machine()

    def fail(number: int, _layer: int) -> None:
        if number == 2:
            raise ContextLengthError("of all things")

    machine.before_layer = fail
    async with running(machine) as client:
        with pytest.raises(ContextLengthError, match="of all things"):
            await heard(client, request(1))
        assert tokens(await heard(client, request(1))) == [2, 3, 4, 5]


def crash_at(machine: Machine, number: int) -> None:
    def crash(at: int, _layer: int) -> None:
        if at == number and len(machine.models) == 1:
            raise Crash

    machine.before_layer = crash


@in_a_loop
async def test_an_engine_that_dies_is_started_again() -> None:
    machine = Machine()
    crash_at(machine, 2)
    async with running(machine) as client:
        with pytest.raises(EngineDiedError, match="process has ended"):
            await heard(client, request(1))
        while client.health is not Health.READY:
            with pytest.raises(EngineDiedError, match="the engine is starting"):
                await client.submit(request(1))
            await asyncio.sleep(0)
        assert tokens(await heard(client, request(1))) == [2, 3, 4, 5]
        assert (len(machine.models), client.failure) == (2, None)


@in_a_loop
async def test_it_gives_up_in_the_end_and_says_why() -> None:
    machine = Machine()
    crash_at(machine, 1)
    machine.refusals = [None, BudgetError("too small"), BudgetError("still too small")]
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async with running(machine, restart_delays_s=(0.0, 7.0), sleep=sleep) as client:
        with pytest.raises(EngineDiedError):
            await heard(client, request(1))
        while client.health is not Health.FAILED:
            await asyncio.sleep(0)
        assert waited == [0.0, 7.0]
        assert str(client.failure) == "still too small"
        with pytest.raises(EngineDiedError, match=r"failed \(still too small\)"):
            await client.submit(request(1))


@in_a_loop
async def test_what_cannot_be_loaded_says_why() -> None:
    machine = Machine()
    machine.refusals = [BudgetError("too small by 3 GiB")]
    client = EngineClient(machine.launch, Open)
    with pytest.raises(BudgetError, match="too small by 3 GiB"):
        await client.start()
    await client.close()


@in_a_loop
async def test_closing_drains() -> None:
    machine = Machine()
    gate = Gate(machine, 2)
    async with running(machine) as client:
        reply = await client.submit(request(1))
        await gate.wait()
        closing = asyncio.create_task(client.close(drain_s=30))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await client.submit(request(2))
        gate.opened.set()
        assert tokens([event async for event in reply]) == [2, 3, 4, 5]
        await closing


@in_a_loop
async def test_closing_at_once_ends_what_runs() -> None:
    machine = Machine(context_length=1024)
    async with running(machine) as client:
        reply = await client.submit(request(1, params=SamplingParams()))
        await client.close()
        *_, finished, done = [event async for event in reply]
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.CANCELLED
        assert isinstance(done, Done)
