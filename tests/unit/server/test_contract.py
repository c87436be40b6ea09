"""What holds for every endpoint, streamed and not."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.unit.server.endpoints import Endpoint, chosen, each, each_path
from tests.unit.server.scripted import CONTEXT, USER, Running

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@each(chats=True)
def test_a_role_marker_ends_the_turn(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    server.service.replies = [[*b"abc", USER, *b"zzz"]]
    answer = endpoint.ask(http, "q", stream)
    assert (answer.content, answer.reason) == ("abc", "stop")
    assert server.service.num_tokens == 4


@each(chats=False)
def test_raw_text_goes_on_after_a_role_marker(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    server.service.replies = [[*b"abc", USER, *b"zzz"]]
    assert endpoint.ask(http, "q", stream).content == "abczzz"


REPLIES: list[Any] = [
    "plain",
    "<think>a</think>b",
    "<think>never closed 🦜",
    "<think>a</think></think>b",
    "<think></think>b",
    "🦜é\u200d\U0001f4bb\n\n",
    [0xF0, 0x9F, *b"x", 0xFF, 0xE2, 0x82],
    "\n\nx\n",
    "",
    f"before {CALL} between {CALL} after",
    f'{CALL}<tool_call>{{"name": broken</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"a": [1e2, true, null, [1]]}}',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    'so <tool_call>{"name": "weather", "arguments": {"city": "Os',
    '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>' + CALL,
]


@pytest.mark.parametrize("endpoint", list(chosen()), ids=lambda endpoint: endpoint.path)
@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_streamed_is_whole(
    server: Running, http: httpx.Client, endpoint: Endpoint, reply: Any
) -> None:
    server.service.replies = [reply]
    options = {"tools": True} if endpoint.has_tools else {}
    whole = endpoint.ask(http, "q", False, **options)
    streamed = endpoint.ask(http, "q", True, **options)
    if streamed.completion_tokens < 0:
        whole.completion_tokens = -1
    assert streamed == whole


@each(has_tools=True)
@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (CALL, "", [("weather", {"city": "Oslo"})]),
        (f"a\n{CALL}\n{CALL}", "a", [("weather", {"city": "Oslo"})] * 2),
        (CALL.removesuffix("</tool_call>"), "", [("weather", {"city": "Oslo"})]),
        ("<tool_call>{no</tool_call>", "<tool_call>{no</tool_call>", []),
        ('<tool_call>{"name": "x"}</tool_call>', "", [("x", {})]),
        (f"[{CALL}]", "[]", [("weather", {"city": "Oslo"})]),
    ],
)
def test_calls(
    server: Running,
    http: httpx.Client,
    endpoint: Endpoint,
    stream: bool,
    reply: str,
    content: str,
    calls: list[Any],
) -> None:
    server.service.replies = [reply]
    answer = endpoint.ask(http, "q", stream, tools=True)
    assert (answer.content, answer.calls) == (content, calls)
    assert answer.reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("endpoint", list(chosen(has_tools=True)), ids=lambda e: e.path)
def test_arguments_come_as_they_are_written(
    server: Running, http: httpx.Client, endpoint: Endpoint
) -> None:
    server.service.replies = [CALL]
    told = endpoint.post(http, "q", True, tools=True)
    letters = re.findall(r'(?:arguments|partial_json|delta)":"(.)"', told.text)
    whole = endpoint.path == "/api/chat"  # in this API calls come in one piece
    assert (len(letters) > 10) != whole
    broken_off = '{"city": "Oslo", "days'
    server.service.replies = [
        '<tool_call>{"name": "weather", "arguments": ' + broken_off + '": 1}}'
    ]
    length = len('x{"name": "weather", "arguments": ' + broken_off)
    answer = endpoint.ask(http, "q", False, tools=True, max_tokens=length)
    takes_text = endpoint.path in ("/v1/chat/completions", "/v1/responses")
    assert answer.calls == [("weather", broken_off if takes_text else {"city": "Oslo"})]


@each(has_stop=True)
@pytest.mark.parametrize(
    ("stop", "content", "num_tokens"),
    [
        ("cd", "ab", 4),
        (["ef", "d"], "abc", 4),
        (["abc", "abcdef"], "", 3),
        ("a", "", 1),
        ("efgh", "abcdef", 7),
        ("q", "abcdef", 7),
        ([], "abcdef", 7),
    ],
)
def test_stop_strings(
    server: Running,
    http: httpx.Client,
    endpoint: Endpoint,
    stream: bool,
    stop: Any,
    content: str,
    num_tokens: int,
) -> None:
    server.service.replies = ["abcdef"]
    answer = endpoint.ask(http, "q", stream, stop=stop)
    assert (answer.content, answer.reason) == (content, "stop")
    assert answer.completion_tokens in (num_tokens, -1)
    assert server.service.num_tokens in (num_tokens, num_tokens + 1)  # one may be on its way


@each(has_stop=True, chats=True)
def test_stop_strings_are_not_looked_for_in_reasoning(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    server.service.replies = ["<think>so X is</think>aXb"]
    answer = endpoint.ask(http, "q", stream, stop="X")
    assert (answer.reasoning, answer.content) == ("so X is", "a")


@each_path
@pytest.mark.parametrize("stop", [["a", "b", "c", "d", "e"], ["a", ""], [1], 1])
def test_stop_strings_that_are_refused(http: httpx.Client, endpoint: Endpoint, stop: Any) -> None:
    limited = endpoint.path in ("/v1/chat/completions", "/v1/completions")
    response = endpoint.post(http, "q", True, stop=stop)
    if isinstance(stop, list) and len(stop) == 5 and not limited and endpoint.has_stop:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert "stop" in response.text


@each()
def test_a_reply_may_fill_the_context(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    server.service.replies = ["x" * CONTEXT]
    answer = endpoint.ask(http, "q", stream)
    assert answer.reason == "length"
    room = CONTEXT - len(server.service.requests[0].prompt)
    assert len(answer.content) == (400 if endpoint.path == "/v1/messages" else room)


@each()
def test_prompts_are_never_cut(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    extra = 3 if endpoint.chats else 0
    for length, status in [(-1, 200), (0, 400), (1, 400)]:
        prompt = "x" * (CONTEXT - extra + length)
        options = {"max_tokens": 1} if endpoint.path == "/v1/messages" else {}
        response = endpoint.post(http, prompt, stream, **options)
        assert response.status_code == status, response.text
        assert ("too many" in response.text) == (status == 400)
        assert "text/event-stream" not in response.headers["content-type"] or status == 200


@each_path
@pytest.mark.parametrize("value", [-5, "5", 5.0, 1e9, True, [], {}])
def test_lengths_of_wrong_type(http: httpx.Client, endpoint: Endpoint, value: Any) -> None:
    response = endpoint.post(http, "q", True, max_tokens=value)
    assert response.status_code == 400
    assert endpoint.max_tokens in response.text


@each_path
def test_a_length_beyond_the_context(
    server: Running, http: httpx.Client, endpoint: Endpoint
) -> None:
    response = endpoint.post(http, "q", False, max_tokens=10**9)
    assert response.status_code == (200 if endpoint.cuts else 400)


@each_path
@pytest.mark.parametrize(
    ("field", "value"),
    [("unheard_of", 1), ("temprature", 1), ("n_predict", 5), ("cache_prompt", True)],
)
def test_unknown_fields_are_named(
    http: httpx.Client, endpoint: Endpoint, field: str, value: Any
) -> None:
    response = http.post(endpoint.path, json={**endpoint.body("q"), field: value})
    assert response.status_code == 400
    assert field in response.text


@each_path
@pytest.mark.parametrize("value", ["1", True, [1], {}, -1, 1e999])
def test_sampling_of_wrong_types(http: httpx.Client, endpoint: Endpoint, value: Any) -> None:
    body = endpoint.body("q")
    target = body.get("options", body)
    target["temperature"] = value
    response = http.post(endpoint.path, content=json.dumps(body))
    assert response.status_code == 400
    assert "temperature" in response.text or "JSON" in response.text


BODIES = [
    b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"{\"a\": NaN}", b'{"a": 1, "a": 2}',
    b"[" * 100_000, b'{"a":' * 100_000, b'{"a": 1} x', b'{"a": ' + b"9" * 10_000 + b"}",
]  # fmt: skip


@each_path
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_hostile_bodies(http: httpx.Client, endpoint: Endpoint, body: bytes) -> None:
    response = http.post(endpoint.path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]


@each_path
def test_half_of_a_surrogate_pair(http: httpx.Client, endpoint: Endpoint) -> None:
    response = http.post(endpoint.path, content=json.dumps(endpoint.body("\ud800")))
    assert response.status_code == 400
    assert "Unicode" in response.text


@each(chats=True)
def test_control_tokens_in_content_are_text(
    server: Running, http: httpx.Client, endpoint: Endpoint, stream: bool
) -> None:
    endpoint.ask(http, "a</s><|system|>b", stream)
    prompt = server.service.requests[0].prompt
    assert bytes(t for t in prompt if t < 256) == b"a</s><|system|>b"


@each_path
def test_methods_and_paths(http: httpx.Client, endpoint: Endpoint) -> None:
    refused = http.get(endpoint.path)
    assert refused.status_code == 405
    assert "is not served here: this path takes POST" in refused.text
    response = http.post(f"{endpoint.path}/other", json={})
    assert response.status_code == 404
    assert response.json()["error"]
    assert "/openapi.json" in response.text
