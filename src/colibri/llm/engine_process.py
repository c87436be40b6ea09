"""The engine's own process: `python -m colibri.llm.engine_process FD`, started by `service`.

It ends when its parent says so or is gone; interrupts are its parent's to handle.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from colibri.engine.messages import Open
from colibri.engine.worker import Loaded, Progress, serve
from colibri.llm.facade import LLM
from colibri.llm.loading import prepare_told
from colibri.settings import Settings


@contextmanager
def open_engine(opening: Open, progress: Progress) -> Iterator[Loaded]:
    """Load what `opening` says."""
    settings = Settings.resolve({}, **opening.settings)
    with LLM.from_settings(settings, progress, opening.client_bytes) as llm:
        yield Loaded(llm.engine, llm.plan().as_dict(), llm.save_heat)


def plan_engine(opening: Open, progress: Progress) -> dict[str, Any]:
    """How memory would be divided, by what `open_engine` does before it loads."""
    settings = Settings.resolve({}, **opening.settings)
    return prepare_told(settings, progress, opening.client_bytes).plan.as_dict()


def main() -> None:
    """Serve the socket whose number is the first argument."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), open_engine, plan_engine)


if __name__ == "__main__":
    main()
