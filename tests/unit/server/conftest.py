from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.server.scripted import Running, running, write_model


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("server") / "scripted"
    with running(write_model(directory), quiet_s=0.2) as server:
        yield server


@pytest.fixture
def server(listening: Running) -> Running:
    """A server that has been asked nothing yet."""
    listening.service.reset()
    return listening


@pytest.fixture(scope="module")
def connected(listening: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=listening.url, timeout=10) as client:
        yield client


@pytest.fixture
def http(server: Running, connected: httpx.Client) -> httpx.Client:
    """A client of a server that has been asked nothing yet."""
    return connected
