"""An engine in a process of its own, for whoever serves many clients at once."""

from __future__ import annotations

from collections.abc import Callable

from colibri.engine.child import launcher
from colibri.engine.client import EngineClient
from colibri.engine.messages import Loading, Open
from colibri.memory.budget import process_rss
from colibri.settings import Settings

MODULE = "colibri.llm.engine_process"


def engine_service(
    settings: Settings, loading: Callable[[Loading], None] = lambda _loading: None
) -> EngineClient:
    """The client of an engine that will be started with these settings.

    `ram` bounds both processes together: this one counts as what it occupies when the engine is
    started.
    """

    def opening() -> Open:
        given = {k: v for k, v in settings.as_dict().items() if v != DEFAULTS[k]}
        return Open(settings=given, client_bytes=process_rss())

    return EngineClient(launcher(MODULE), opening, loading=loading)


DEFAULTS = Settings().as_dict()
