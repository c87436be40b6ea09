"""Who may ask: host names, origins of web pages, and the key; before anything else is looked at."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colibri.server.endpoint import Envelope
from colibri.server.problems import Problem
from colibri.server.serving import Limits

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: load balancers and containers ask them."""


class Guard:
    """Lets through what may ask.

    A Host header of another name is refused, which is what DNS rebinding would send; so is an
    Origin that is not allowed, which is what a foreign web page would send.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, envelope_of: Callable[[str], Envelope]
    ) -> None:
        self._app = app
        self._limits = limits
        self._envelope_of = envelope_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is None or self._is_allowed(origin, headers.get("host", ""))
        answer: ASGIApp | None = None
        problem = self._problem(scope, headers, allowed)
        if problem is not None:
            envelope = self._envelope_of(scope["path"])
            answer = JSONResponse(envelope(problem), problem.status, dict(problem.headers))
        elif scope["method"] == "OPTIONS" and origin is not None:
            answer = Response(status_code=204)
        shares = origin is not None and origin in self._limits.cors_origins
        sends = _sharing(send, origin) if shares and origin is not None else send
        await (answer or self._app)(scope, receive, sends)

    def _problem(self, scope: Scope, headers: Headers, origin_allowed: bool) -> Problem | None:
        host = host_name(headers.get("host", ""))
        if self._limits.allowed_hosts and host not in self._limits.allowed_hosts:
            message = f"host {host!r} is not allowed (`--allowed-host` adds names)"
            return Problem(403, message, None, "host_not_allowed")
        if not origin_allowed:
            message = "web pages of this origin may not ask (`--cors-origin` adds origins)"
            return Problem(403, message, None, "origin_not_allowed")
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        if self._limits.api_key is None or _has_key(headers, self._limits.api_key):
            return None
        message = "the API key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key`"
        return Problem(401, message, None, "invalid_api_key", {"www-authenticate": "Bearer"})

    def _is_allowed(self, origin: str, host: str) -> bool:
        own = urlsplit(origin).netloc == host  # a page that this server itself has sent
        return own or origin in self._limits.cors_origins


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hmac.compare_digest(shown.encode(), key.encode())


def _sharing(send: Send, origin: str) -> Send:
    """Tell the browser that the page may read the answer."""
    shared = [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
        (b"vary", b"Origin"),
    ]

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *shared]}
        await send(message)

    return sends
