"""The engine in a process of its own: the same tokens, and what happens when somebody dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from colibri import LLM
from colibri.engine.messages import Event, Tokens
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.service import Health
from colibri.errors import CheckpointError, EngineDiedError
from colibri.llm.service import engine_service
from colibri.settings import Settings
from tests.tiny import PLAIN, write_tiny
from tests.unit.llm.fakes import write_tokenizer

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
IDS = (5, 9, 200, 31)
PARENT = """
import asyncio, sys
from colibri.llm.service import engine_service
from colibri.settings import Settings

async def main():
    service = engine_service(Settings(model=sys.argv[1], heat=False))
    await service.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny(tmp_path_factory.mktemp("process") / "model", PLAIN)
    write_tokenizer(directory)
    return directory


def in_a_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """A test that runs in an event loop, and ends."""

    def run(model: Path) -> None:
        asyncio.run(asyncio.wait_for(test(model), 60))

    run.__name__ = test.__name__
    return run


def settings(model: Path, **more: Any) -> Settings:
    return Settings(model=str(model), max_sessions=2, threads=1, heat=False, **more)


def tokens(events: list[Event]) -> list[int]:
    return [token for e in events if isinstance(e, Tokens) for token in e.token_ids]


async def heard(service: Any, request: GenerateRequest) -> list[Event]:
    async with await service.submit(request) as reply:
        return [event async for event in reply]


@in_a_loop
async def test_the_same_tokens_as_in_this_process(model: Path) -> None:
    service = engine_service(settings(model))
    ready = await service.start()
    assert ready.pid != os.getpid()
    assert (ready.max_sessions, ready.plan["max_sessions"]) == (2, 2)
    requests = [GenerateRequest(prompt=prompt, params=PARAMS) for prompt in (IDS, IDS[::-1])]
    found = await asyncio.gather(*(heard(service, request) for request in requests))
    held = GenerateRequest(prompt=IDS, params=PARAMS, constraint={"regex": "[ab]{3}"})
    constrained = tokens(await heard(service, held))
    await service.close()
    with LLM.open(model, threads=1, heat=False) as llm:
        for request, events in zip(requests, found, strict=True):
            wanted = llm.generate(request.prompt, **PARAMS.as_dict())
            assert tokens(events) == wanted.token_ids
        same = llm.generate(IDS, constraint=held.constraint, **PARAMS.as_dict())
    assert constrained == same.token_ids
    assert same.text is not None
    assert (len(same.text), set(same.text) <= {"a", "b"}) == (3, True)


@in_a_loop
async def test_a_killed_engine_is_started_again(model: Path) -> None:
    service = engine_service(settings(model))
    ready = await service.start()
    endless = SamplingParams(ignore_eos=True)
    reply = await service.submit(GenerateRequest(prompt=IDS, params=endless))
    os.kill(ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        async for _ in reply:
            pass
    while service.health is not Health.READY:
        await asyncio.sleep(0)
    assert service.ready is not None
    assert service.ready.pid != ready.pid
    assert len(tokens(await heard(service, GenerateRequest(prompt=IDS, params=PARAMS)))) == 5
    await service.close()


@in_a_loop
async def test_what_cannot_be_loaded_says_why(model: Path) -> None:
    service = engine_service(settings(model / "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere"):
        await service.start()
    assert service.health is Health.FAILED
    await service.close()


def test_the_engine_ends_with_its_parent(model: Path) -> None:
    """Both hold the pipe: its end comes when both are gone."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ""
