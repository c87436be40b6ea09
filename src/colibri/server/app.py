"""All paths, and what stands before them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from colibri.server import anthropic, monitor, ollama, plain
from colibri.server.endpoint import Endpoint, Envelope
from colibri.server.guard import Guard
from colibri.server.openai import chat, completions, envelope, models, responses
from colibri.server.problems import Problem
from colibri.server.serving import Handler, Serving

GET, POST = "GET", "POST"
PATHS: tuple[tuple[str, str, Handler], ...] = (
    (POST, "/v1/chat/completions", chat.chat),
    (POST, "/v1/completions", completions.completions),
    (POST, "/v1/responses", responses.responses),
    (POST, "/v1/embeddings", models.embeddings),
    (GET, "/v1/models", models.models),
    (GET, "/v1/models/{name:path}", models.model),
    (POST, "/v1/messages", anthropic.messages),
    (POST, "/v1/messages/count_tokens", anthropic.count_tokens),
    (POST, "/api/chat", ollama.chat),
    (POST, "/api/generate", ollama.generate),
    (GET, "/api/tags", ollama.tags),
    (POST, "/api/show", ollama.show),
    (GET, "/api/version", ollama.version),
    (POST, "/completion", plain.completion),
    (POST, "/tokenize", plain.tokenize),
    (POST, "/detokenize", plain.detokenize),
    (GET, "/health", monitor.health),
    (GET, "/stats", monitor.stats),
    (GET, "/metrics", monitor.metrics),
)
ALIASES = ("/openai",)
"""Prefixes under which `/v1` is found too: KServe's."""


def create_app(serving: Serving) -> ASGIApp:
    """The server as an ASGI application."""
    routes = [
        Route(prefix + path, Endpoint(serving, handler, envelope_of(path)), methods=[method])
        for method, path, handler in PATHS
        for prefix in ("", *(ALIASES if path.startswith("/v1/") else ()))
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    return Guard(app, serving.limits, envelope_of)


def envelope_of(path: str) -> Envelope:
    """How the API that a path belongs to spells problems."""
    if path.startswith("/v1/messages"):
        return anthropic.envelope
    if path.startswith("/api/"):
        return ollama.envelope
    return envelope.envelope


async def _refused(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that it does not take."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    known = ", ".join(sorted({path for _, path, _ in PATHS}))
    problem = Problem(error.status_code, f"{what} is not served here: known are {known}")
    spelled = envelope_of(request.url.path)(problem)
    return JSONResponse(spelled, problem.status, dict(error.headers or {}))
