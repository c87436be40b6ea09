"""Fields that are known and not honoured are refused by name; harmless ones are taken."""

from typing import Any

import httpx
import pytest

from tests.unit.server.endpoints import TOOL, said
from tests.unit.server.scripted import Running

CHAT_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"
CHAT = {"messages": said("q")}
COMPLETION = {"prompt": "q"}
MESSAGES = {"model": "scripted", "max_tokens": 5, "messages": said("q")}
RESPONSES = {"input": "q"}
OLLAMA = {"model": "scripted", "messages": said("q"), "stream": False}
GENERATE = {"model": "scripted", "prompt": "q", "stream": False}
NEGATIVE = {"type": "enabled", "budget_tokens": -1}
KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
BASH = {"type": "bash_20250124", "name": "bash"}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
PICTURE = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
FUNCTION = {"type": "function", "function": TOOL}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]
BROKEN = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b'}}]
RESULT = {"role": "tool", "content": "x", "tool_call_id": "a"}

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (CHAT_PATH, CHAT, {"store": True}, "store"),
    (CHAT_PATH, CHAT, {"audio": {}}, "audio"),
    (CHAT_PATH, CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT_PATH, CHAT, {"prediction": {}}, "prediction"),
    (CHAT_PATH, CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT_PATH, CHAT, {"functions": []}, "functions"),
    (CHAT_PATH, CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT_PATH, CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT_PATH, CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT_PATH, CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT_PATH, CHAT, {"n": 0}, "n is 0"),
    (CHAT_PATH, CHAT, {"stream_options": {}}, "stream_options"),
    (CHAT_PATH, CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (CHAT_PATH, CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    (CHAT_PATH, CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT_PATH, CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT_PATH, CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT_PATH, CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT_PATH, CHAT, {"tool_choice": "sometimes"}, "tool_choice"),
    (CHAT_PATH, CHAT, {"tools": [FUNCTION, FUNCTION]}, "tools"),
    (CHAT_PATH, CHAT, {"tools": [{"type": "code"}]}, "tools[0].type"),
    (
        CHAT_PATH,
        CHAT,
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    (CHAT_PATH, CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT_PATH, CHAT, {"response_format": {"type": "json_schema"}}, "json_schema"),
    (CHAT_PATH, CHAT, {"regex": "("}, "constraint"),
    (CHAT_PATH, CHAT, {"regex": "a", "grammar": "b"}, "regex"),
    (CHAT_PATH, CHAT, {"messages": []}, "messages"),
    (CHAT_PATH, CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "[0].type"),
    (CHAT_PATH, CHAT, {"messages": [{"role": "robot", "content": ""}]}, "[0].role"),
    (
        CHAT_PATH,
        CHAT,
        {"messages": [{"role": "robot", "content": ""}]},
        "role: is 'robot': it must be 'assistant' or 'developer' or 'system' or",
    ),
    (CHAT_PATH, CHAT, {"messages": "hi"}, "messages: is a text: a list is wanted"),
    (CHAT_PATH, CHAT, {"temperature": "hot"}, "temperature: is a text: a number is wanted"),
    (CHAT_PATH, CHAT, {"stop": 1}, "stop: is an integer: a text or a list is wanted"),
    ("/api/chat", OLLAMA, {"messages": [{"role": "robot"}]}, "it must be 'assistant' or 'system'"),
    (CHAT_PATH, CHAT, {"messages": [{"role": "assistant"}]}, "[0].content"),
    (CHAT_PATH, CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    (
        CHAT_PATH,
        CHAT,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "b"}]},
        "tool_call_id",
    ),
    (
        CHAT_PATH,
        CHAT,
        {"messages": [*said("q"), {"role": "assistant", "tool_calls": CALLS}]},
        "arguments",
    ),
    ("/v1/completions", COMPLETION, {"suffix": "x"}, "suffix"),
    ("/v1/completions", COMPLETION, {"best_of": 2}, "best_of"),
    ("/v1/completions", COMPLETION, {"echo": True, "logprobs": 1}, "echo"),
    ("/v1/completions", COMPLETION, {"prompt": ["a", "b"]}, "prompt"),
    ("/v1/completions", COMPLETION, {"prompt": []}, "prompt"),
    ("/v1/completions", COMPLETION, {"prompt": [1, "a"]}, "prompt"),
    (MESSAGES_PATH, MESSAGES, {"container": "x"}, "container"),
    (MESSAGES_PATH, MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"),
    (MESSAGES_PATH, MESSAGES, {"context_management": {"edits": [{"type": "x"}]}}, "edits[0]"),
    (MESSAGES_PATH, MESSAGES, {"output_config": {"effort": "low"}}, "reasoning_effort"),
    (MESSAGES_PATH, MESSAGES, {"tools": [BASH]}, "tools[0].type"),
    (MESSAGES_PATH, MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MESSAGES_PATH, MESSAGES, {"thinking": NEGATIVE}, "budget_tokens"),
    (
        MESSAGES_PATH,
        MESSAGES,
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        "messages[0].content[0].type",
    ),
    ("/v1/responses", RESPONSES, {"store": True}, "store"),
    ("/v1/responses", RESPONSES, {"previous_response_id": "x"}, "previous_response_id"),
    ("/v1/responses", RESPONSES, {"background": True}, "background"),
    ("/v1/responses", RESPONSES, {"truncation": "auto"}, "truncation"),
    ("/v1/responses", RESPONSES, {"include": ["file_search_call.results"]}, "include[0]"),
    ("/v1/responses", RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/responses", RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type"),
    ("/v1/responses", RESPONSES, {"input": [{"type": "function_call"}]}, "input[0].name"),
    ("/api/chat", OLLAMA, {"logprobs": True}, "logprobs"),
    ("/api/chat", OLLAMA, {"keep_alive": 0}, "keep_alive"),
    ("/api/chat", OLLAMA, {"messages": [{"role": "user", "images": ["x"]}]}, "images"),
    ("/api/chat", OLLAMA, {"options": {"mirostat": 1}}, "options.mirostat"),
    ("/api/chat", OLLAMA, {"think": "high"}, "reasoning_effort"),
    ("/api/generate", GENERATE, {"context": [1]}, "context"),
    ("/api/generate", GENERATE, {"template": "x"}, "template"),
    ("/api/generate", GENERATE, {"raw": True, "system": "x"}, "system"),
    ("/completion", COMPLETION, {"json_schema": {}, "regex": "a"}, "json_schema"),
    ("/completion", COMPLETION, {"stop_ids": [-1]}, "stop_ids"),
    ("/completion", COMPLETION, {"stop_ids": [2**70]}, "stop_ids"),
    ("/completion", COMPLETION, {"prompt": [2**70]}, "prompt"),
    ("/completion", COMPLETION, {"prompt": [300]}, "below 300"),
    ("/completion", COMPLETION, {"seed": 2**70}, "seed"),
    ("/completion", COMPLETION, {"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ("/tokenize", {}, {}, "prompt"),
    ("/tokenize", {"prompt": "a", "content": "b"}, {}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, {}, "negative"),
    ("/detokenize", {"tokens": "x"}, {}, "tokens"),
]  # fmt: skip
TAKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        CHAT_PATH,
        CHAT,
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop": "",
         "safety_identifier": "s", "prompt_cache_key": "k",
         "modalities": ["text"], "logprobs": False,
         "response_format": {"type": "text"}, "max_tokens": None, "stream": None, "tools": []},
    ),
    ("/v1/completions", COMPLETION, {"user": "u", "best_of": 1, "suffix": "", "max_tokens": 0}),
    ("/v1/completions", COMPLETION, {"prompt": [[1, 2]]}),
    (MESSAGES_PATH, MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto"}),
    (MESSAGES_PATH, MESSAGES, {"context_management": KEPT, "output_config": {"effort": "high"}}),
    (CHAT_PATH, CHAT, {"reasoning_effort": "medium"}),
    ("/v1/responses", RESPONSES, {"reasoning": {"effort": "medium", "summary": "auto"}}),
    ("/v1/messages?beta=true", MESSAGES, {"thinking": {"type": "adaptive"}}),
    ("/v1/responses", RESPONSES, {"store": False, "include": ["reasoning.encrypted_content"]}),
    ("/openai/v1/chat/completions", CHAT, {}),
    (
        CHAT_PATH,
        CHAT,
        {"messages": [*said("q"), {"role": "assistant", "tool_calls": BROKEN}, RESULT]},
    ),
    ("/api/chat", OLLAMA, {"keep_alive": "5m", "format": "", "think": None}),
    ("/completion", COMPLETION, {"prompt": [1, 2]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "change", "named"), REFUSED)
def test_refused(
    server: Running,
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    change: dict[str, Any],
    named: str,
) -> None:
    response = http.post(path, json={**body, **change})
    assert response.status_code == 400, response.text
    assert named in response.text
    assert server.service.requests == []


@pytest.mark.parametrize(("path", "body", "change"), TAKEN)
def test_taken(
    server: Running, http: httpx.Client, path: str, body: dict[str, Any], change: dict[str, Any]
) -> None:
    response = http.post(path, json={**body, **change})
    assert response.status_code == 200, response.text


def test_tokenizing(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "<|user|>é"}).json()
    assert answer == {"tokens": [259, 0xC3, 0xA9], "count": 3, "max_model_len": 512}
    asked = http.post("/tokenize", json={"messages": said("q")}).json()
    assert asked["tokens"] == [256, 259, ord("q"), 260]
    answer = http.post("/detokenize", json={"tokens": [259, 0xC3, 0xA9]}).json()
    assert answer["prompt"] == "<|user|>é"
