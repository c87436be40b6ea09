"""A conversation goes on after a restart, or a kill, with the bits of one that never ended."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.engine.client import EngineClient
from colibri.engine.messages import Started, Tokens
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.service import Health
from colibri.kernels.library import unavailable_reason
from colibri.llm.service import engine_service
from colibri.models import deepseek_v3, deepseek_v4, qwen3_next
from colibri.models.family import Family
from colibri.models.registry import all_families
from colibri.settings import Settings
from tests.tiny import PLAIN, write_tiny

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)
IDS = np.random.RandomState(4).randint(3, 512, 90).tolist()
MORE = np.random.RandomState(5).randint(3, 512, 7).tolist()


@pytest.fixture(scope="module", params=all_families(), ids=lambda f: f.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    return write_tiny(tmp_path_factory.mktemp(family.model_type) / "model", family)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_after_a_restart(model: Path, tmp_path: Path, kv: str) -> None:
    """All that the state holds comes back; under other settings it is left aside."""
    request = PARAMS.as_dict()
    with LLM.open(model, kv=kv, session_dir=tmp_path) as llm, llm.open_session() as session:
        first = llm.generate(IDS, session=session, **request).token_ids
        following = [*IDS, *first, *MORE]
        wanted = llm.generate(following, session=session, **request)
        assert wanted.metrics.reused_tokens == len(IDS) + 5
    with LLM.open(model, kv=kv, session_dir=tmp_path) as llm, llm.open_session() as session:
        again = llm.generate(following, session=session, **request)
        assert again.token_ids == wanted.token_ids
        assert again.metrics.reused_tokens == len(following) - 1
        assert llm.notes == ()
    with LLM.open(model, kv="f16", session_dir=tmp_path) as llm:
        assert llm.generate(following, **request).metrics.reused_tokens == 0


KINDS = [
    PLAIN,
    qwen3_next.FAMILY,  # a recurrent state
    pytest.param(deepseek_v3.FAMILY, marks=pytest.mark.slow),  # latents
    pytest.param(deepseek_v4.FAMILY, marks=pytest.mark.slow),  # windows, and sums in progress
]


@pytest.mark.parametrize("family", KINDS, ids=lambda family: family.model_type)
def test_after_a_kill(tmp_path: Path, family: Family) -> None:
    """In the middle of writing, and after."""
    directory = write_tiny(tmp_path / "model", family)
    sessions = tmp_path / "sessions"
    settings = Settings(model=str(directory), session_dir=str(sessions), heat=False, threads=1)
    with LLM.open(directory, heat=False) as llm:
        first = llm.generate(IDS, **PARAMS.as_dict()).token_ids
        following = [*IDS, *(first or ()), *MORE]
        second = llm.generate(following, **PARAMS.as_dict()).token_ids

    async def ask(service: EngineClient, prompt: list[int]) -> tuple[list[int], int]:
        request = GenerateRequest(prompt=tuple(prompt), params=PARAMS)
        events = [event async for event in await service.submit(request)]
        started = next(event for event in events if isinstance(event, Started))
        tokens = [t for event in events if isinstance(event, Tokens) for t in event.token_ids]
        return tokens, started.reused_tokens

    async def kill(service: EngineClient) -> None:
        assert service.ready is not None
        os.kill(service.ready.pid, signal.SIGKILL)
        while service.health is Health.READY:
            await asyncio.sleep(0)
        while service.health is not Health.READY:
            await asyncio.sleep(0)

    async def scenario() -> None:
        service = engine_service(settings)
        await service.start()
        assert await ask(service, IDS) == (first, 0)
        await kill(service)
        again, _ = await ask(service, IDS)  # whatever of it was there
        assert again == first
        assert await ask(service, following) == (second, len(IDS) + 5)
        while (await service.metrics()).num_unsaved:
            pass
        await kill(service)
        assert await ask(service, following) == (second, len(following) - 1)
        await service.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
