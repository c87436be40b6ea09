"""The server's life: what it listens on, and how it ends."""

import asyncio
import socket
from pathlib import Path

import pytest

from colibri.errors import SettingsError
from colibri.server.running import Binding, bound, run
from colibri.server.served_model import ServedModel
from colibri.server.serving import Serving
from tests.unit.server.scripted import ScriptedService, write_model


def test_a_name_is_bound_at_every_address() -> None:
    sockets = bound(Binding(host="localhost", port=0))
    try:
        assert "127.0.0.1" in {one.getsockname()[0] for one in sockets}
    finally:
        for one in sockets:
            one.close()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} of 127.0.0.1 .*: set port to"):
            bound(Binding(port=port))


def test_a_cancelled_server_ends(tmp_path: Path) -> None:
    model = ServedModel.load(write_model(tmp_path / "scripted"))
    serving = Serving(model=model, engine=ScriptedService(model.tokenizer))

    async def main() -> None:
        def cancel(host: str, port: int) -> None:
            running.cancel()

        binding = Binding(port=0, drain_s=1)
        running = asyncio.create_task(run(serving, binding, on_listening=cancel))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)

    asyncio.run(main())
