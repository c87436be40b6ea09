"""Whatever stands in a body, the answer is the API's own, and the server goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.server.endpoints import TOOL, said
from tests.unit.server.scripted import Running

FUNCTION = {"type": "function", "function": TOOL}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "a"},
            ],
            "tools": [FUNCTION], "tool_choice": "auto", "n": 1, "seed": 1, "stop": ["z"],
            "logit_bias": {"1": 2}, "logprobs": True, "top_logprobs": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        },
    ),
    ("/v1/completions", {"prompt": "q", "max_tokens": 5, "logprobs": 1, "echo": False}),
    ("/completion", {"prompt": [1, 2], "json_schema": SCHEMA, "stop_ids": [1], "temperature": 1}),
    (
        "/v1/messages",
        {
            "model": "scripted", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "x"}}
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "x"}
                ]},
            ],
            "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "x"},
            ],
            "tools": [{"type": "function", **TOOL}], "reasoning": {"effort": "medium"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        },
    ),
    (
        "/api/chat",
        {
            "model": "scripted", "messages": said("q"), "tools": [FUNCTION], "format": SCHEMA,
            "options": {"num_predict": 5, "stop": ["z"], "seed": 1},
        },
    ),
    ("/api/generate", {"model": "scripted", "prompt": "q", "options": {"top_k": 3}}),
    ("/tokenize", {"messages": said("q"), "tools": [FUNCTION]}),
    ("/detokenize", {"tokens": [1, 2]}),
]  # fmt: skip
DEEP: Any = json.loads("[" * 400 + "]" * 400)
VALUES: list[Any] = [
    None, True, 0, -1, 2**64, -(2**70), 10**300, 1e308, "", "\u0000", "\ud800", "null", [], [[]],
    [None], {}, {"": 1}, DEEP, {"type": "x"}, [{"type": "text", "text": 1}], {"\ud800": "\ud800"},
]  # fmt: skip
each_body = pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield place
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from places(each, (*place, key))


def replaced(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    if not place:
        return other
    copied = value.copy()
    copied[place[0]] = replaced(value[place[0]], place[1:], other)
    return copied


@each_body
def test_any_value_anywhere(
    server: Running, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Each value of the list at each place, by turns streamed and not; a third of them a run."""
    kinds = set()
    for number, place in enumerate(places(body)):
        for at in range(number % 3, len(VALUES), 3):
            asked = replaced(body, place, VALUES[at])
            if isinstance(asked, dict) and "stream" not in asked and "tokens" not in body:
                asked = asked | ({} if path == "/tokenize" else {"stream": at % 2 == 0})
            answer = http.post(path, content=json.dumps(asked))
            kinds.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (place, VALUES[at], answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"], (place, VALUES[at])
            assert "internal_error" not in answer.text, (place, VALUES[at])
    assert kinds >= {200, 400}
    assert server.service.in_flight == set()


def test_many_messages_and_tools(server: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": said("q") * 10_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    tools = [{"type": "function", "function": {**TOOL, "name": f"f{i}"}} for i in range(2000)]
    answer = http.post("/v1/chat/completions", json={"messages": said("q"), "tools": tools})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    answer = http.post("/completion", json={"prompt": "q", "max_tokens": 3, "json_schema": wide})
    assert answer.status_code in (200, 400)


def test_paths_that_are_made_up_are_not_counted_each(server: Running, http: httpx.Client) -> None:
    for number in range(50):
        assert http.get(f"/v1/models/m{number}").status_code == 404
    counted = {answer["path"] for answer in http.get("/stats").json()["server"]["answers"]}
    assert "/v1/models/{name}" in counted
    assert not any("m1" in path for path in counted)
