"""The official clients against the whole program, on a model whose every reply is known."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.unit.server.counter_model import CALL, CONTENT, REPLY, write_counter
from tests.unit.server.endpoints import ENDPOINTS, Endpoint, each
from tests.unit.server.served import Served

ASK: Any = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("counter")
    model = write_counter(folder / "scripted")
    made = Served(
        "--model", str(model), "--cache-dir", str(folder), "--context-length", "512",
        "--served-name", "scripted", "--expert-slots", "50%",
    )  # fmt: skip
    made.wait_for("scripted is ready")
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as client:
        yield client


@each(has_tools=True)
def test_every_endpoint_says_it_all(http: httpx.Client, endpoint: Endpoint, stream: bool) -> None:
    answer = endpoint.ask(http, "q", stream, tools=True)
    assert (answer.content, answer.reasoning) == (CONTENT, "hm")
    assert answer.calls == [("weather", json.loads(CALL)["arguments"])]
    assert answer.reason == "tool_calls"
    assert answer.completion_tokens in (len(REPLY), -1)


@each(has_stop=True, chats=True)
def test_stops(http: httpx.Client, endpoint: Endpoint, stream: bool) -> None:
    answer = endpoint.ask(http, "q", stream, stop="🦜")
    assert (answer.content, answer.reason) == ("Hi ", "stop")
    assert answer.completion_tokens in (REPLY.index("\x9c.") + 1, -1)


@each(chats=True)
def test_lengths(http: httpx.Client, endpoint: Endpoint, stream: bool) -> None:
    answer = endpoint.ask(http, "q", stream, max_tokens=5)
    assert (answer.content, answer.reason) == ("Hi", "length")


def test_many_at_a_time_are_as_one(http: httpx.Client) -> None:
    alone = [endpoint.ask(http, "some question", True) for endpoint in ENDPOINTS]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda e: e.ask(http, "some question", True), ENDPOINTS * 4))
    assert together == alone * 4


def test_openai(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"],
                "additionalProperties": False}  # fmt: skip
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
        options: Any = {"model": "scripted", "messages": ASK, "temperature": 0}
        reply = client.chat.completions.create(
            **options, tools=tools, logprobs=True, top_logprobs=2, n=2
        )
        assert [choice.message.content for choice in reply.choices] == [CONTENT] * 2
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 2 * len(REPLY)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        entry = (logprobs.content or [])[1]
        assert (entry.token, entry.top_logprobs[0].token) == ("Hi", "Hi")
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        schema: Any = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"const": [1]}},
        }
        shaped = client.chat.completions.create(**options, response_format=schema)
        assert json.loads(shaped.choices[0].message.content or "") == [1]
        named: Any = {"type": "function", "function": {"name": "weather"}}
        called = client.chat.completions.create(
            **options, tools=tools, tool_choice=named, parallel_tool_calls=False
        )
        function: Any = (called.choices[0].message.tool_calls or [])[0]
        assert json.loads(function.function.arguments) == {"city": "Oslo"}
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "x" * 600}], stream=True
            )
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="scripted", messages=ASK, temperature=-1)


def test_anthropic(served: Served) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model="scripted", max_tokens=99, messages=ASK) as events:
            message = events.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.usage.output_tokens == len(REPLY)


def test_ollama(served: Served) -> None:
    client = ollama.Client(host=served.url)
    parts = list(client.chat(model="scripted", messages=ASK, stream=True))
    assert "".join(p.message.content or "" for p in parts).startswith(CONTENT)
    assert parts[-1].eval_count == len(REPLY)
    assert (parts[-1].eval_duration or 0) > 0
    client._client.close()


def test_prefixes_are_reused_and_nobody_sees_it(http: httpx.Client) -> None:
    prompt = "x" * 150
    bodies = [{"prompt": prompt + tail, "max_tokens": 3} for tail in ("a", "b", "a")]
    answers = [http.post("/completion", json=body).json() for body in bodies]
    assert answers[0]["token_ids"] == answers[2]["token_ids"] == [98, 99, 100]
    assert answers[1]["token_ids"] == [99, 100, 101]
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
