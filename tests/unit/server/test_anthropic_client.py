"""Anthropic's own client against the server."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from colibri.errors import BusyError, NumericsError
from tests.unit.server.scripted import CONTEXT, Running

ASK: Any = [{"role": "user", "content": "q"}]
TOOL: Any = {
    "name": "weather",
    "description": "d",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, stream: bool, **options: Any) -> Any:
    """The message, put together by the client where it is streamed."""
    request: Any = {"model": "scripted", "max_tokens": 100, "messages": ASK, **options}
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_blocks(server: Running, client: anthropic.Anthropic, stream: bool) -> None:
    server.service.replies = [f"<think>\nhm\n</think>\n\nhi 🦜{CALL}"]
    server.service.reused = 2
    message = ask(client, stream, tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "hm"
    assert message.content[1].text == "hi 🦜"
    assert (message.content[2].name, message.content[2].input) == ("weather", {"city": "Oslo"})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    prompt = len(server.service.requests[0].prompt)
    assert message.usage.input_tokens == prompt - 2
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == server.service.num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(server: Running, client: anthropic.Anthropic, stream: bool) -> None:
    server.service.replies = ["one two three"]
    message = ask(client, stream, stop_sequences=["wo", "e t"])
    assert message.content[0].text == "on"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e t")
    assert message.usage.output_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_lengths(server: Running, client: anthropic.Anthropic, stream: bool) -> None:
    server.service.replies = ["x" * CONTEXT]
    assert ask(client, stream, max_tokens=5).stop_reason == "max_tokens"
    message = ask(client, stream, max_tokens=2000)
    assert message.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_demanded_tools(
    server: Running, client: anthropic.Anthropic, choice: Any, stream: bool
) -> None:
    server.service.replies = ["no"]
    message = ask(client, stream, tools=[TOOL], tool_choice=choice)
    assert message.content[-1].input["city"] in ("Oslo", "Rome")


def test_conversations(server: Running, client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": "Well"},
    ]
    system: Any = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    ask(client, False, messages=messages, system=system)
    tokenizer = server.serving.model.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(server.service.requests[0].prompt, skip_special=False) == (
        "<s><|system|>S<|user|>q<|assistant|><think>t</think>x"
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call></s>'
        "<|tool|>Error: rain<|user|>go on<|assistant|>Well"
    )


def test_thinking(server: Running, client: anthropic.Anthropic) -> None:
    server.service.replies = ["hm</think>hi"]
    message = ask(client, False, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_within_its_budget(
    server: Running, client: anthropic.Anthropic, stream: bool
) -> None:
    server.service.replies = [f"abcdefgh</think>hi{CALL}"]
    message = ask(client, stream, thinking={"type": "enabled", "budget_tokens": 5}, tools=[TOOL])
    assert message.content[0].thinking == "abcde"
    server.service.requests.clear()
    message = ask(client, stream, thinking={"type": "enabled", "budget_tokens": 50}, tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "abcdefgh"


def test_counting(server: Running, client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="scripted", messages=ASK)
    assert count.input_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Running, client: anthropic.Anthropic, stream: bool) -> None:
    server.service.refuses = BusyError("too many wait", 2)
    with pytest.raises(anthropic.RateLimitError, match="too many wait"):
        ask(client, stream)
    with pytest.raises(anthropic.NotFoundError, match="scripted"):
        ask(client, stream, model="other")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(client, stream, max_tokens=0)


def test_a_failure_within_a_stream(server: Running, client: anthropic.Anthropic) -> None:
    server.service.replies = ["abcdef"]
    server.service.fails = (3, NumericsError("layer 3"))
    with pytest.raises(anthropic.APIError, match="layer 3"):
        ask(client, True)
