"""Ollama's own client against the server."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from colibri.errors import BusyError, NumericsError
from tests.unit.server.scripted import CONTEXT, Running

ASK: Any = [{"role": "user", "content": "q"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    made = ollama.Client(host=server.url)
    yield made
    made._client.close()  # it offers no other way


def ask(client: ollama.Client, stream: bool, **options: Any) -> tuple[str, str, list[Any], Any]:
    """Content, thinking, calls and the last part."""
    parts: Any = client.chat(model="scripted", messages=ASK, stream=stream, **options)
    parts = list(parts) if stream else [parts]
    content = "".join(part.message.content or "" for part in parts)
    thinking = "".join(part.message.thinking or "" for part in parts)
    return content, thinking, [c for p in parts for c in p.message.tool_calls or []], parts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat(server: Running, client: ollama.Client, stream: bool) -> None:
    server.service.replies = [f"hm</think>\n\nhi 🦜{CALL}"]
    content, thinking, calls, last = ask(client, stream, think=True, tools=[TOOL])
    assert (content, thinking) == ("hi 🦜", "hm")
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", {"city": "Oslo"})
    assert (last.done, last.done_reason) == (True, "stop")
    assert last.prompt_eval_count == len(server.service.requests[0].prompt)
    assert last.eval_count == server.service.num_tokens
    assert last.total_duration == 750_000_000


@pytest.mark.parametrize("stream", [False, True])
def test_options(server: Running, client: ollama.Client, stream: bool) -> None:
    server.service.replies = ["one two three"]
    options = {"num_predict": 9, "temperature": 0.5, "seed": 3, "stop": ["two"], "num_ctx": 128}
    content, _, _, last = ask(client, stream, options=options)
    assert (content, last.done_reason) == ("one ", "stop")
    params = server.service.requests[0].params
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 3, 9)
    assert ask(client, stream, options={"num_predict": 3})[3].done_reason == "length"
    assert ask(client, stream, options={"num_predict": -1})[0] == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_formats(server: Running, client: ollama.Client, stream: bool) -> None:
    server.service.replies = ['so {"a": 1}']
    assert json.loads(ask(client, stream, format="json")[0]) == {"a": 1}
    schema = {"const": [1, 2]}
    assert json.loads(ask(client, stream, format=schema)[0]) == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_generate(server: Running, client: ollama.Client, stream: bool, raw: bool) -> None:
    server.service.replies = ["abc"]
    parts: Any = client.generate(model="scripted", prompt="q", raw=raw, stream=stream)
    parts = list(parts) if stream else [parts]
    assert "".join(part.response for part in parts) == "abc"
    assert bytes(server.service.requests[0].prompt[-1:]) == b"q" if raw else True


def test_loading_and_listing(server: Running, client: ollama.Client) -> None:
    assert client.chat(model="scripted:latest").done_reason == "load"
    assert client.generate(model="scripted").done_reason == "load"
    assert [model.model for model in client.list().models] == ["scripted"]
    shown = client.show("scripted")
    assert shown.details is not None
    assert (shown.details.family, shown.details.families) == ("scripted", ["scripted"])
    assert {"completion", "tools", "thinking"} == set(shown.capabilities or [])


@pytest.mark.parametrize(
    ("options", "named"),
    [({"mirostat": 1}, "mirostat"), ({"num_ctx": CONTEXT + 1}, "num_ctx"), ({"top_p": 2}, "top_p")],
)
def test_options_that_are_not_honoured(
    server: Running, client: ollama.Client, options: Any, named: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=named) as caught:
        ask(client, True, options=options)
    assert caught.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_failures(server: Running, client: ollama.Client, stream: bool) -> None:
    server.service.replies = ["abcdef"]
    server.service.fails = (3, NumericsError("layer 3"))
    with pytest.raises(ollama.ResponseError, match="layer 3"):
        ask(client, stream)
    server.service.refuses = BusyError("too many wait")
    with pytest.raises(ollama.ResponseError, match="too many wait"):
        ask(client, stream)
