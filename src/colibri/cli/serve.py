"""`coli serve`: the model for clients of OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from colibri.cli.options import with_settings
from colibri.cli.progress import Reporter
from colibri.settings import Settings

if TYPE_CHECKING:
    from colibri.engine.messages import Loading, Ready

SESSIONS = 4
"""Replies that are computed together where `--max-sessions` is not given."""


@with_settings
def serve(*, settings: Settings) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs."""
    settings = with_sessions(settings)
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.server.opening import binding_of, serving_of
        from colibri.server.running import run

        def loading(told: Loading) -> None:
            reporter(told.stage, told.done, told.total)

        serving = serving_of(settings, loading)
        name = serving.model.name

        def listening(host: str, port: int) -> None:
            reporter.close()
            shown = f"[{host}]" if ":" in host else host
            say(f"listening on http://{shown}:{port}, loading {name}")

        def ready(told: Ready) -> None:
            reporter.close()
            calls_as = serving.model.calls_as
            say(
                f"{name} is ready: context {told.context_length:,}, {told.max_sessions} "
                f"repl{'y' if told.max_sessions == 1 else 'ies'} at a time"
                f"{f', tool calls as {calls_as}' if calls_as else ''}; Ctrl-C stops"
            )

        asyncio.run(run(serving, binding_of(settings), on_listening=listening, on_ready=ready))
    say("stopped")


def with_sessions(settings: Settings) -> Settings:
    """The settings, with a number of sessions."""
    return replace(settings, max_sessions=settings.max_sessions or SESSIONS)


def say(text: str) -> None:
    """Tell people something."""
    print(f"coli: {text}", file=sys.stderr, flush=True)
