"""The boundary of the engine's process: a client on one end of a socket, an engine in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from colibri.engine.client import EngineClient
from colibri.engine.messages import (
    Done,
    Finished,
    Loading,
    Open,
    Prefill,
    Started,
    Tokens,
)
from colibri.engine.request import FinishReason, SamplingParams
from colibri.engine.service import EngineService, Health
from colibri.errors import (
    BudgetError,
    BusyError,
    ContextLengthError,
    EngineDiedError,
    RequestError,
    ShuttingDownError,
)
from tests.unit.engine.threads import (
    CountingChannel,
    Crash,
    Gate,
    Machine,
    handled,
    heard,
    in_a_loop,
    request,
    running,
    tokens,
)


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri.engine.worker.Channel", CountingChannel)


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
    assert machine.rests == 1


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


@in_a_loop
async def test_cancelling_frees_the_engine_between_two_layers() -> None:
    machine = Machine()
    gate = Gate(machine, 1)
    async with running(machine) as client:
        reply = await client.submit(request(*range(16)))
        await gate.wait()
        assert client.num_in_flight == 1
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
    machine = Machine()
    gate = Gate(machine, 2)
    async with running(machine) as client:
        reply = await client.submit(request(1))
        await gate.wait()
        (reader,) = [t for t in threading.enumerate() if t.name == "colibri-messages"]
        closing = asyncio.create_task(client.close())
        await asyncio.to_thread(reader.join)  # it has read the last message
        gate.opened.set()
        *_, finished, done = [event async for event in reply]
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.CANCELLED
        assert isinstance(done, Done)
        await closing
