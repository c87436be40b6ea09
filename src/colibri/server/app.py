"""All paths, and what stands before them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from colibri.server import anthropic, monitor, ollama, ollama_bodies, plain
from colibri.server.endpoint import Endpoint, Envelope
from colibri.server.guard import Guard
from colibri.server.openai import chat, completions, envelope, models, responses
from colibri.server.openapi import Path, openapi
from colibri.server.problems import Problem
from colibri.server.serving import Call, Serving

GET, POST = "GET", "POST"
PATHS: tuple[Path, ...] = (
    Path(POST, "/v1/chat/completions", chat.chat, chat.ChatBody),
    Path(POST, "/v1/completions", completions.completions, completions.CompletionBody),
    Path(POST, "/v1/responses", responses.responses, responses.ResponsesBody),
    Path(POST, "/v1/embeddings", models.embeddings),
    Path(GET, "/v1/models", models.models),
    Path(GET, "/v1/models/{name:path}", models.model),
    Path(POST, "/v1/messages", anthropic.messages, anthropic.MessagesBody),
    Path(POST, "/v1/messages/count_tokens", anthropic.count_tokens, anthropic.CountBody),
    Path(POST, "/api/chat", ollama.chat, ollama_bodies.ChatBody),
    Path(POST, "/api/generate", ollama.generate, ollama_bodies.GenerateBody),
    Path(GET, "/api/tags", ollama.tags),
    Path(POST, "/api/show", ollama.show, ollama_bodies.ShowBody),
    Path(GET, "/api/version", ollama.version),
    Path(POST, "/completion", plain.completion, plain.CompletionBody),
    Path(POST, "/tokenize", plain.tokenize, plain.TokenizeBody),
    Path(POST, "/detokenize", plain.detokenize, plain.DetokenizeBody),
    Path(GET, "/health", monitor.health),
    Path(GET, "/stats", monitor.stats),
    Path(GET, "/metrics", monitor.metrics),
)
ALIASES = ("/openai",)
"""Prefixes under which `/v1` is found too: KServe's."""


def create_app(serving: Serving) -> ASGIApp:
    """The server as an ASGI application."""
    routes = [
        Route(
            prefix + path.path,
            Endpoint(path.template, serving, path.handler, envelope_of(path.path)),
            methods=[path.method],
        )
        for path in (*PATHS, *ABOUT)
        for prefix in ("", *(ALIASES if path.path.startswith("/v1/") else ()))
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


async def greeting(call: Call) -> ASGIApp:
    """Say who is there; some clients look for a server that way."""
    return PlainTextResponse("Colibri is running")


async def described(call: Call) -> ASGIApp:
    """Describe all paths."""
    return JSONResponse(openapi(PATHS))


ABOUT = (Path(GET, "/openapi.json", described), Path(GET, "/", greeting))
"""Paths about the server itself."""


async def _refused(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that it does not take."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    allowed = (error.headers or {}).get("Allow")
    if allowed is not None:
        hint = f"this path takes {' or '.join(sorted(allowed.split(', ')))}"
    else:
        hint = f"known are {', '.join(sorted({path.template for path in (*PATHS, *ABOUT)}))}"
    problem = Problem(error.status_code, f"{what} is not served here: {hint}")
    spelled = envelope_of(request.url.path)(problem)
    return JSONResponse(spelled, problem.status, dict(error.headers or {}))
