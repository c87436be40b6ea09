"""`coli chat --attach URL`: a server answers, this one's or another that speaks OpenAI's API."""

from __future__ import annotations

import json
import queue
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from colibri.cli.chat_partners import Cancelled, Messages, continued
from colibri.cli.progress import Reporter
from colibri.errors import ContextLengthError, RequestError
from colibri.settings import variable_of

if TYPE_CHECKING:
    from colibri.text.dialects import Event

_LOOK_S = 0.1  # how often Ctrl-C is looked for
_CONNECT_S = 10.0
PROGRESS = re.compile(rb": prompt (\d{1,12})/(\d{1,12})")
"""A comment in a stream of this program's server: tokens of the prompt that are done, and all."""


class AttachedPartner:
    """See `Partner`. Leaving an answer closes the connection, which cancels it there."""

    def __init__(self, url: str, reporter: Reporter, api_key: str | None = None) -> None:
        """Connect, and ask what is served.

        Raises:
            RequestError: nobody answers there, or not as a server.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"--attach {url}: it must be an address such as http://HOST:8080")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._socket: socket.socket | None = None
        self.name = str(self._json("GET", "/v1/models")["data"][0]["id"])
        self.continues = not self._has_template()
        self.footer = ""
        self._reporter = reporter

    def answer(
        self, messages: Messages, sampling: Mapping[str, Any], cancelled: Cancelled
    ) -> Iterator[Event]:
        """See `Partner.answer`."""
        given = {k: v for k, v in sampling.items() if v not in (None, False, [])}
        path, asked = self._asked(messages)
        body = {
            "model": self.name,
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **given,
        }
        connection = self._connection()
        try:
            response = self._ask(connection, "POST", path, body)
            yield from self._events(response, cancelled)
        finally:
            self._hang_up()
            connection.close()

    def _hang_up(self) -> None:
        """End the connection now: a thread may still read it, which would keep it open."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _asked(self, messages: Messages) -> tuple[str, dict[str, Any]]:
        """The path that answers, and what it is asked."""
        if self.continues:
            return "/v1/completions", {"prompt": continued(messages)}
        return "/v1/chat/completions", {"messages": [dict(message) for message in messages]}

    def _events(self, response: HTTPResponse, cancelled: Cancelled) -> Iterator[Event]:
        from colibri.text.dialects import Channel, TextDelta

        reason, usage = "cancelled", dict[str, Any]()
        for part in self._parts(response, cancelled):
            if "error" in part:
                raise _error(part)
            usage = part.get("usage") or usage
            for choice in part["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                reason = choice["finish_reason"] or reason
                if delta.get("reasoning_content"):
                    yield TextDelta(Channel.REASONING, delta["reasoning_content"])
                if delta.get("content"):
                    yield TextDelta(Channel.CONTENT, delta["content"])
        self.footer = self._told(usage, reason)

    def _told(self, usage: Mapping[str, Any], reason: str) -> str:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        parts = [
            f"{usage.get('completion_tokens', 0)} tokens ({reason}) from {self._host}",
            f"{cached:,} of {usage.get('prompt_tokens', 0):,} prompt tokens were still there"
            if cached
            else "",
        ]
        return " · ".join(part for part in parts if part)

    def _parts(self, response: HTTPResponse, cancelled: Cancelled) -> Iterator[Any]:
        """The events of a stream; how far the prompt is goes to the reporter."""
        for line in _lines(response, cancelled):
            progress = PROGRESS.fullmatch(line.strip())
            if progress is not None:
                self._reporter.prompt(int(progress[1]), int(progress[2]))
            elif line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def count(self, messages: Messages) -> str:
        """See `Partner.count`."""
        if not messages:
            return "0 tokens"
        _, asked = self._asked(messages)
        told = self._json("POST", "/tokenize", asked)
        return f"{told['count']:,} of {told['max_model_len']:,} tokens"

    def stats(self) -> str:
        """See `Partner.stats`."""
        engine = self._json("GET", "/stats")["engine"] or {}
        return (
            f"{engine.get('num_requests', 0)} answers, {engine.get('completion_tokens', 0):,} "
            f"tokens, by all clients of {self._host}"
        )

    def _has_template(self) -> bool:
        """Whether the model is asked in turns; servers that do not say so are asked that way."""
        try:
            told = self._json("GET", "/stats")
        except RequestError:
            return True
        return not isinstance(told, dict) or told.get("chat_template") is not False

    def _connection(self) -> HTTPConnection:
        return self._kind(self._host, timeout=_CONNECT_S)

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        connection = self._connection()
        try:
            return json.loads(self._ask(connection, method, path, body).read())
        except ValueError as error:
            raise RequestError(f"{self._host} does not answer as a server: {error}") from error
        finally:
            connection.close()

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: Any) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            connection.request(method, self._base + path, data, headers)
            self._socket = connection.sock
            self._socket.settimeout(None)  # a long prompt takes its time
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise RequestError(f"{self._host} does not answer: {error}") from error
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise RequestError(
                f"{self._host}: {_error(_read_json(response))}: set {variable_of('api_key')} to "
                "the key it asks for"
            )
        if response.status != 200:
            raise _error(_read_json(response))
        return response


def _read_json(response: HTTPResponse) -> Any:
    raw = response.read()
    try:
        return json.loads(raw)
    except ValueError:
        return {"error": {"message": f"{response.status} {raw[:200].decode(errors='replace')}"}}


def _error(told: Any) -> RequestError:
    error = told.get("error") if isinstance(told, dict) else told
    message = error.get("message") if isinstance(error, dict) else str(error)
    long = isinstance(error, dict) and error.get("code") == "context_length_exceeded"
    return (ContextLengthError if long else RequestError)(str(message))


def _lines(response: HTTPResponse, cancelled: Cancelled) -> Iterator[bytes]:
    """The lines of a stream; a thread waits for them, so that Ctrl-C need not."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in response:
                lines.put(line)
        except (OSError, ValueError, HTTPException, AttributeError):
            pass  # the connection was closed, here or there
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while not cancelled():
        try:
            line = lines.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if line is None:
            return
        yield line
