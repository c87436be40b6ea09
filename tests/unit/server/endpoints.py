"""Every endpoint that generates, asked in one way and answering in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from colibri.text.dialects import object_of

TOOL = {
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@dataclass
class Answer:
    """What an endpoint said, in terms of none."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = ""
    completion_tokens: int = -1


@dataclass(frozen=True)
class Endpoint:
    """One path.

    Attributes:
        path: of it.
        body: makes its body of a prompt, and of `stop`, `max_tokens` and `tools` where given.
        whole: reads an answer.
        streamed: reads an answer in pieces.
        chats: it goes through the chat template.
        has_stop: it takes stop strings.
        has_tools: it takes tools.
        cuts: `max_tokens` may exceed the context.
    """

    path: str
    body: Callable[..., dict[str, Any]]
    whole: Callable[[Any], Answer]
    streamed: Callable[[list[Any]], Answer]
    chats: bool = True
    has_stop: bool = True
    has_tools: bool = True
    cuts: bool = False
    max_tokens: str = "max_tokens"

    def post(self, http: httpx.Client, prompt: str, stream: bool, **options: Any) -> httpx.Response:
        return http.post(self.path, json={**self.body(prompt, **options), "stream": stream})

    def ask(self, http: httpx.Client, prompt: str, stream: bool, **options: Any) -> Answer:
        response = self.post(http, prompt, stream, **options)
        assert response.status_code == 200, response.text
        return self.streamed(pieces(response.text)) if stream else self.whole(response.json())


def pieces(text: str) -> list[Any]:
    """The JSON of every event or line."""
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _function_tools(tools: bool) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": TOOL}]} if tools else {}


def chat_body(prompt: str, tools: bool = False, **options: Any) -> dict[str, Any]:
    return {"messages": said(prompt), **_function_tools(tools), **options}


def _called(calls: Any) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in calls or []]
    return [(f["name"], _arguments(f["arguments"])) for f in functions]


def _arguments(text: str) -> Any:
    """What arguments say; their text where they are broken off."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def chat_whole(answer: Any) -> Answer:
    choice, message = answer["choices"][0], answer["choices"][0]["message"]
    return Answer(
        message["content"] or "",
        message.get("reasoning_content", ""),
        _called(message.get("tool_calls")),
        choice["finish_reason"],
        answer["usage"]["completion_tokens"],
    )


def chat_streamed(parts: list[Any]) -> Answer:
    answer = Answer()
    calls: list[Any] = []
    for part in parts:
        for choice in part["choices"]:
            delta = choice["delta"]
            answer.content += delta.get("content") or ""
            answer.reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(calls):
                    assert piece["id"]
                    calls.append(piece)
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            answer.reason = choice["finish_reason"] or answer.reason
        if part.get("usage"):
            answer.completion_tokens = part["usage"]["completion_tokens"]
    answer.calls = _called(calls)
    return answer


def completion_body(prompt: str, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, **options}


def completion_whole(answer: Any) -> Answer:
    choice = answer["choices"][0]
    tokens = answer["usage"]["completion_tokens"]
    return Answer(choice["text"], reason=choice["finish_reason"], completion_tokens=tokens)


def completion_streamed(parts: list[Any]) -> Answer:
    choices = [choice for part in parts for choice in part["choices"]]
    tokens = [p["usage"]["completion_tokens"] for p in parts if p.get("usage")]
    return Answer(
        "".join(choice["text"] for choice in choices),
        reason=choices[-1]["finish_reason"],
        completion_tokens=(tokens or [-1])[-1],
    )


def plain_whole(answer: Any) -> Answer:
    tokens = answer["usage"]["completion_tokens"]
    assert len(answer["token_ids"]) == tokens
    return Answer(answer["text"], reason=answer["finish_reason"], completion_tokens=tokens)


def plain_streamed(parts: list[Any]) -> Answer:
    answer = Answer("".join(part["text"] for part in parts), reason=parts[-1]["finish_reason"])
    answer.completion_tokens = parts[-1]["usage"]["completion_tokens"]
    return answer


REASONS = {
    "end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length",
    "model_context_window_exceeded": "length", "completed": "stop", "incomplete": "length",
}  # fmt: skip


def messages_body(prompt: str, tools: bool = False, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "scripted", "messages": said(prompt), "max_tokens": 400}
    if "stop" in options:
        stop = options.pop("stop")
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if tools:
        body["tools"] = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
    return {**body, **options}


def messages_whole(answer: Any) -> Answer:
    made = Answer(reason=REASONS[answer["stop_reason"]])
    for block in answer["content"]:
        made.content += block.get("text", "")
        made.reasoning += block.get("thinking", "")
        made.calls += [(block["name"], block["input"])] if block["type"] == "tool_use" else []
    made.completion_tokens = answer["usage"]["output_tokens"]
    return made


def messages_streamed(parts: list[Any]) -> Answer:
    blocks: list[Any] = []
    made: dict[str, Any] = {"content": blocks}
    for part in parts:
        match part["type"]:
            case "content_block_start":
                blocks.append({**part["content_block"], "json": ""})
            case "content_block_delta":
                delta = part["delta"]
                for key, value in delta.items():
                    name = {"partial_json": "json"}.get(key, key)
                    if name in ("text", "thinking", "json"):
                        blocks[-1][name] += value
            case "message_delta":
                made |= {"stop_reason": part["delta"]["stop_reason"], "usage": part["usage"]}
    for block in blocks:
        block["input"] = object_of(block["json"])
    return messages_whole(made)


def responses_body(prompt: str, tools: bool = False, **options: Any) -> dict[str, Any]:
    if "max_tokens" in options:
        options["max_output_tokens"] = options.pop("max_tokens")
    return {"input": prompt, "tools": [{"type": "function", **TOOL}] if tools else [], **options}


def responses_whole(answer: Any) -> Answer:
    made = Answer(reason=REASONS[answer["status"]])
    for item in answer["output"]:
        text = "".join(part["text"] for part in item.get("content", []))
        made.content += text if item["type"] == "message" else ""
        made.reasoning += text if item["type"] == "reasoning" else ""
        if item["type"] == "function_call":
            made.calls.append((item["name"], _arguments(item["arguments"])))
    if made.calls and made.reason == "stop":
        made.reason = "tool_calls"
    made.completion_tokens = answer["usage"]["output_tokens"]
    return made


def responses_streamed(parts: list[Any]) -> Answer:
    """By the deltas; the last event must say the same."""
    made = responses_whole(parts[-1]["response"])
    kinds = ["output_text", "reasoning_text", "function_call_arguments"]
    deltas = {f"response.{kind}.delta": "" for kind in kinds}
    for part in parts:
        if part["type"] in deltas:
            deltas[part["type"]] += part["delta"]
    items = parts[-1]["response"]["output"]
    arguments = "".join(item.get("arguments", "") for item in items)
    assert list(deltas.values()) == [made.content, made.reasoning, arguments]
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    return made


def _options(options: dict[str, Any]) -> dict[str, Any]:
    names = {"max_tokens": "num_predict"}
    return {"model": "scripted", "options": {names.get(k, k): v for k, v in options.items()}}


def ollama_chat_body(prompt: str, tools: bool = False, **options: Any) -> dict[str, Any]:
    return {**_options(options), "messages": said(prompt), **_function_tools(tools)}


def ollama_generate_body(prompt: str, **options: Any) -> dict[str, Any]:
    return {**_options(options), "prompt": prompt}


def ollama_streamed(parts: list[Any]) -> Answer:
    made = Answer()
    for part in parts:
        message = part.get("message", {})
        made.content += part.get("response", "") + message.get("content", "")
        made.reasoning += part.get("thinking", "") + message.get("thinking", "")
        functions = [call["function"] for call in message.get("tool_calls", [])]
        made.calls += [(f["name"], f["arguments"]) for f in functions]
    made.completion_tokens = parts[-1]["eval_count"]
    made.reason = "tool_calls" if made.calls else parts[-1]["done_reason"]
    return made


def ollama_whole(answer: Any) -> Answer:
    return ollama_streamed([answer])


ENDPOINTS = [
    Endpoint("/v1/chat/completions", chat_body, chat_whole, chat_streamed),
    Endpoint(
        "/v1/completions", completion_body, completion_whole, completion_streamed,
        chats=False, has_tools=False,
    ),
    Endpoint(
        "/completion", completion_body, plain_whole, plain_streamed, chats=False, has_tools=False
    ),
    Endpoint("/v1/messages", messages_body, messages_whole, messages_streamed, cuts=True),
    Endpoint(
        "/v1/responses", responses_body, responses_whole, responses_streamed, has_stop=False,
        max_tokens="max_output_tokens",
    ),
    Endpoint("/api/chat", ollama_chat_body, ollama_whole, ollama_streamed, cuts=True,
             max_tokens="num_predict"),
    Endpoint("/api/generate", ollama_generate_body, ollama_whole, ollama_streamed, cuts=True,
             has_tools=False, max_tokens="num_predict"),
]  # fmt: skip


def chosen(**features: bool) -> Iterator[Endpoint]:
    """The endpoints with these features."""
    for endpoint in ENDPOINTS:
        if all(getattr(endpoint, name) == value for name, value in features.items()):
            yield endpoint


def each(**features: bool) -> pytest.MarkDecorator:
    """Over the endpoints with these features, streamed and not."""
    return pytest.mark.parametrize(
        ("endpoint", "stream"),
        [
            pytest.param(endpoint, stream, id=f"{endpoint.path}-{'stream' if stream else 'whole'}")
            for endpoint in chosen(**features)
            for stream in (False, True)
        ],
    )


each_path = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
