"""OpenAI's own client against the server."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from colibri.errors import BusyError, NumericsError, ShuttingDownError
from tests.unit.server.scripted import CONTEXT, Running

ASK: Any = [{"role": "user", "content": "q"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def joined(stream: Any) -> tuple[str, str, list[Any], Any, Any]:
    """Content, reasoning, calls, finish reason and usage of a stream."""
    content = reasoning = ""
    calls: list[Any] = []
    reason = usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", "") or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    calls.append(piece)
                else:
                    calls[piece.index].function.arguments += piece.function.arguments
            reason = choice.finish_reason or reason
    return content, reasoning, calls, reason, usage


def test_chat(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["<think>\nhm\n</think>\n\nhi 🦜"]
    whole = client.chat.completions.create(model="scripted", messages=ASK)
    message = whole.choices[0].message
    assert (message.content, message.role) == ("hi 🦜", "assistant")
    assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        4,
        server.service.num_tokens,
    )


def test_streamed_chat(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["<think>\nhm\n</think>\n\nhi 🦜"]
    server.service.reused = 3
    stream = client.chat.completions.create(
        model="scripted", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    content, reasoning, _, reason, usage = joined(stream)
    assert (content, reasoning, reason) == ("hi 🦜", "hm", "stop")
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details.reasoning_tokens > 3


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(server: Running, client: openai.OpenAI, stream: bool) -> None:
    server.service.replies = [f"so\n{CALL}\n{CALL}"]
    reply: Any = client.chat.completions.create(
        model="scripted", messages=ASK, tools=[WEATHER], stream=stream
    )
    if stream:
        content, _, calls, reason, _ = joined(reply)
    else:
        message = reply.choices[0].message
        content, calls, reason = message.content, message.tool_calls, reply.choices[0].finish_reason
    assert (content, reason) == ("so", "tool_calls")
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo", "days": 2}
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_demanded_calls(server: Running, client: openai.OpenAI, choice: Any) -> None:
    server.service.replies = ["I would rather not: 7"]
    reply = client.chat.completions.create(
        model="scripted", messages=ASK, tools=[WEATHER], tool_choice=choice,
        parallel_tool_calls=False,
    )  # fmt: skip
    calls: Any = reply.choices[0].message.tool_calls
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["city"] in ("Oslo", "Rome")
    assert isinstance(arguments["days"], int)
    assert reply.choices[0].finish_reason == "tool_calls"


def test_no_calls(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = [CALL]
    reply = client.chat.completions.create(
        model="scripted", messages=ASK, tools=[WEATHER], tool_choice="none"
    )
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


def test_results_of_calls_in_another_order(server: Running, client: openai.OpenAI) -> None:
    calls: Any = [
        {"id": i, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for i in ("a", "b")
    ]
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]
    client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    tokenizer = server.serving.model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(server.service.requests[-1].prompt, skip_special=False)
    assert prompt.index("<|tool|>A") < prompt.index("<|tool|>B")


def test_json_schema(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["<think>well</think>Here you are: 12"]
    schema = WEATHER["function"]["parameters"]
    reply = client.chat.completions.create(
        model="scripted",
        messages=ASK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )
    value = json.loads(reply.choices[0].message.content or "")
    assert value["city"] in ("Oslo", "Rome")
    assert reply.choices[0].message.reasoning_content == "well"  # type: ignore[attr-defined]


def test_json_object(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ['No! {"a": 1}']
    reply = client.chat.completions.create(
        model="scripted", messages=ASK, response_format={"type": "json_object"}
    )
    assert json.loads(reply.choices[0].message.content or "") == {"a": 1}


def test_logprobs(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["<think>x</think>é"]
    options: Any = {"model": "scripted", "messages": ASK, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert [entry.bytes for entry in whole.content or []] == [[0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in whole.content or []] == [2, 2]
    found: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        logprobs = chunk.choices[0].logprobs
        found += logprobs.content or [] if logprobs else []
    assert [entry.bytes for entry in found] == [[0xC3], [0xA9]]


def test_several_replies(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["abc"]
    reply = client.chat.completions.create(model="scripted", messages=ASK, n=3, seed=7)
    assert [choice.message.content for choice in reply.choices] == ["abc"] * 3
    assert server.service.requests[0].n == 3
    assert server.service.requests[0].params.seed == 7


def test_sampling_reaches_the_engine(server: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="scripted", messages=ASK, temperature=0.5, top_p=0.9, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"65": 3}, max_completion_tokens=9,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )  # fmt: skip
    params = server.service.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert (params.logit_bias, params.max_tokens) == ({65: 3}, 9)


def test_the_assistants_message_is_gone_on_with(server: Running, client: openai.OpenAI) -> None:
    messages: Any = [*ASK, {"role": "assistant", "content": "Once"}]
    client.chat.completions.create(model="scripted", messages=messages)
    assert bytes(server.service.requests[0].prompt[-4:]) == b"Once"


@pytest.mark.parametrize(("thinking", "opened"), [(True, True), (False, False), (None, False)])
def test_thinking(
    server: Running, client: openai.OpenAI, thinking: bool | None, opened: bool
) -> None:
    server.service.replies = ["so</think>yes" if opened else "yes"]
    reply = client.chat.completions.create(
        model="scripted", messages=ASK, extra_body={"enable_thinking": thinking}
    )
    message: Any = reply.choices[0].message
    assert message.content == "yes"
    assert getattr(message, "reasoning_content", None) == ("so" if opened else None)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (BusyError("too many wait", 2.5), openai.RateLimitError, 429),
        (ShuttingDownError("bye"), openai.InternalServerError, 503),
        (NumericsError("layer 3"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_the_stream(
    server: Running, client: openai.OpenAI, error: Exception, kind: Any, status: int, stream: bool
) -> None:
    server.service.refuses = error
    with pytest.raises(kind, match=str(error)) as caught:
        client.chat.completions.create(model="scripted", messages=ASK, stream=stream)
    assert caught.value.status_code == status
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "3"


def test_a_failure_within_a_stream(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["abcdef"]
    server.service.fails = (3, NumericsError("layer 3, position 9"))
    stream = client.chat.completions.create(model="scripted", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="layer 3, position 9"):
        joined(stream)


def test_too_long(server: Running, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x" * CONTEXT}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=messages, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_another_model(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="scripted"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


def test_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model="scripted", input="x")
    assert caught.value.status_code == 501


@pytest.mark.parametrize("stream", [False, True])
def test_completions(server: Running, client: openai.OpenAI, stream: bool) -> None:
    server.service.replies = ["<think>é🦜"]
    reply: Any = client.completions.create(
        model="scripted", prompt="ab", stream=stream, logprobs=1, stop="🦜!"
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == "<think>é🦜"
    tokens = [t for c in choices if c.logprobs for t in c.logprobs.token_logprobs]
    assert tokens == [-0.5] * 7
    assert choices[-1].finish_reason == "stop"


def test_echo(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["cd"]
    reply = client.completions.create(model="scripted", prompt=["ab"], echo=True, max_tokens=1)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abc", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: Running, client: openai.OpenAI, stream: bool) -> None:
    server.service.replies = [f"<think>hm</think>hi{CALL}"]
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    if stream:
        with client.responses.stream(model="scripted", input="q", tools=tools) as events:
            kinds = [event.type for event in events]
            reply: Any = events.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 3
    else:
        reply = client.responses.create(model="scripted", input="q", tools=tools)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    assert reply.output_text == "hi"
    assert json.loads(reply.output[2].arguments) == {"city": "Oslo", "days": 2}
    assert (reply.status, reply.usage.input_tokens) == (
        "completed",
        len(server.service.requests[0].prompt),
    )


def test_responses_of_several_turns(server: Running, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
    ]
    client.responses.create(
        model="scripted", input=items, instructions="S", max_output_tokens=3, store=False
    )
    tokenizer = server.serving.model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(server.service.requests[0].prompt, skip_special=False)
    assert prompt == (
        "<s><|system|>S<|user|>q<|assistant|><think>t</think>x"
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call></s><|tool|>rain<|assistant|>'
    )


def test_responses_that_are_cut(server: Running, client: openai.OpenAI) -> None:
    server.service.replies = ["abcdef"]
    reply = client.responses.create(model="scripted", input="q", max_output_tokens=3)
    assert (reply.status, reply.output_text) == ("incomplete", "abc")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
