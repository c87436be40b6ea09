"""Streamed is the same as whole, in every dialect."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.text.dialects import DIALECTS, CallArguments, Dialect, ReplyParser, object_of
from colibri.text.dialects.demanded import may_repeat
from colibri.text.dialects.events import ToolCall
from tests.examples import examples
from tests.unit.text.dialects.replies import (
    ARGUMENTS,
    CALLING,
    THINKING,
    TOOLS,
    cut,
    opened,
    parsed,
    spelled_call,
)

each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
each_calling = pytest.mark.parametrize("dialect", CALLING, ids=lambda d: d.name)
each_thinking = pytest.mark.parametrize("dialect", THINKING, ids=lambda d: d.name)


def pieces_of(dialect: Dialect) -> list[str]:
    """Texts that mean something in a dialect, and some that mean nothing."""
    markers = sorted(dialect.markers)
    calls = [spelled_call(dialect, "weather", ARGUMENTS)] if dialect.written else []
    calls += [call[:end] for call in calls for end in (len(call) // 2, len(call) - 3)]
    plain = ["word", " ", "\n", "🦜", "{", '"', "\\", "</", "<", "|", "weather", "1e2", "```"]
    return [*markers, *calls, *(m[:-1] for m in markers), *plain]


@each
@given(data=st.data())
@settings(max_examples=examples(12))
def test_cuts_do_not_matter(dialect: Dialect, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(dialect)), max_size=8)))
    prompt = data.draw(st.sampled_from(["", *sorted(dialect.markers)]))
    whole = parsed(dialect, [text], prompt=prompt)
    assert parsed(dialect, cut(text, data.draw(st.integers(0, 99))), prompt=prompt) == whole
    assert parsed(dialect, list(text), prompt=prompt) == whole


@each
@given(text=st.text(alphabet="ab \n🦜é>:.", max_size=40))
@settings(max_examples=examples(10))
def test_text_without_markers_stays_as_it_is(dialect: Dialect, text: str) -> None:
    assert parsed(dialect, cut(text, len(text)))[0] == text


@each_calling
def test_calls_are_read_as_they_are_written(dialect: Dialect) -> None:
    call = spelled_call(dialect, "weather", ARGUMENTS)
    content, reasoning, calls = parsed(dialect, list(call), prompt=opened(dialect))
    assert (content, reasoning) == ("", "")
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("weather", ARGUMENTS)]


@each_calling
def test_several_calls(dialect: Dialect) -> None:
    if not may_repeat(dialect):
        return  # what such a call holds ends with the reply, or each has a message of its own
    text = spelled_call(dialect, "weather", ARGUMENTS) + "\n" + spelled_call(dialect, "noon", {})
    content, _, calls = parsed(dialect, cut(text, 1))
    assert content == ""
    assert [call.name for call in calls] == ["weather", "noon"]
    assert json.loads(calls[1].arguments) == {}


@each_calling
def test_without_tools_nothing_is_a_call(dialect: Dialect) -> None:
    assert parsed(dialect, [spelled_call(dialect, "weather", ARGUMENTS)], tools=None)[2] == []


@each_thinking
def test_reasoning_and_content(dialect: Dialect) -> None:
    opening, closing = dialect.reasoning[0]
    assert parsed(dialect, list(f"{opening}\na\n\nb\n{closing}\n\nc\n")) == ("c\n", "a\n\nb", [])


@each_thinking
def test_reasoning_that_the_prompt_opened(dialect: Dialect) -> None:
    opening, closing = dialect.reasoning[0]
    prompt = f"…{opening}\n"
    assert parsed(dialect, [f"a{closing}b"], prompt=prompt) == ("b", "a", [])
    assert parsed(dialect, ["never closed"], prompt=prompt) == ("", "never closed", [])


@each_thinking
def test_closed_twice(dialect: Dialect) -> None:
    opening, closing = dialect.reasoning[0]
    assert parsed(dialect, list(f"{opening}a{closing}{closing}b")) == ("b", "a", [])


@each_thinking
def test_reasoning_is_switched_off(dialect: Dialect) -> None:
    opening, closing = dialect.reasoning[0]
    assert parsed(dialect, ["b"], prompt=f"{opening}\n\n{closing}\n\n") == ("b", "", [])


def test_thinking_markers_within_content_are_text() -> None:
    text = "Write <think>so</think> here."
    assert parsed(named("json-tags"), list(text)) == (text, "", [])


def test_recipients_on_lines_of_their_own() -> None:
    text = 'all\nSo:>>> 1 + 1\n>>>weather\n{"city": ">>>"}>>>noon\n{}'
    content, _, calls = parsed(named("recipient-lines"), list(text), prompt="\n\n>>>")
    assert (content, [(c.name, c.arguments) for c in calls]) == (
        "So:>>> 1 + 1",
        [("weather", '{"city": ">>>"}'), ("noon", "{}")],
    )


def named(name: str) -> Dialect:
    return next(dialect for dialect in DIALECTS if dialect.name == name)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"x": 1e2, "y": [true, null, [1]]}}', {"x": 100.0}),
        ('{"name": "f", "arguments": "{\\"x\\": 100.0}"}', {"x": 100.0}),
        ('{"name": "f", "arguments": {"x": "a</tool_call>b"}}', {"x": "a</tool_call>b"}),
        ('{"name": "f"}', {}),
        ('{"name": "unknown", "arguments": {}}', {}),
    ],
)
def test_json_bodies(body: str, arguments: dict[str, object]) -> None:
    content, _, calls = parsed(named("json-tags"), list(f"<tool_call>\n{body}\n</tool_call>"))
    assert content == ""
    assert json.loads(calls[0].arguments).items() >= arguments.items()


@pytest.mark.parametrize(
    "body",
    ["", "{", "{}", '{"name": 1}', '{"name": "f", "arguments": [1]}', '{"name": "f"} x', "NaN",
     '{"arguments": {"x": NaN}, "name": "f"}', "[" * 5000, '{"name": "f", "arguments": "x"}'],
)  # fmt: skip
def test_what_is_no_call_is_text(body: str) -> None:
    text = f"so <tool_call>{body}</tool_call> and"
    assert parsed(named("json-tags"), cut(text, 3)) == (text, "", [])


def test_a_good_call_after_a_broken_one() -> None:
    good = spelled_call(named("json-tags"), "noon", {})
    content, _, calls = parsed(named("json-tags"), list(f'<tool_call>{{"</tool_call>{good}'))
    assert content == '<tool_call>{"</tool_call>'
    assert [call.name for call in calls] == ["noon"]


def test_a_call_that_nothing_closes() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}}'
    assert parsed(named("json-tags"), list(text))[2][0].name == "f"
    begins = text.index('{"x"')
    assert parsed(named("json-tags"), list(text[:begins])) == (text[:begins], "", [])
    for end in range(begins + 1, len(text)):
        call = ToolCall("f", text[begins:end].removesuffix("}" * (end == len(text))))
        assert parsed(named("json-tags"), list(text[:end])) == ("", "", [call])


def test_arguments_that_are_broken_are_told_as_they_are() -> None:
    tags = named("json-tags")
    body = '{"name": "f", "arguments": {"x": NaN, oops}} really'
    text = f"so <tool_call>{body}</tool_call> and"
    call = ToolCall("f", '{"x": NaN, oops}')
    assert parsed(tags, cut(text, 3)) == ("soreally and", "", [call])
    unclosed = '{"x": "a}}</tool_call> b'
    text = f'<tool_call>{{"name": "f", "arguments": {unclosed}'
    assert parsed(tags, list(text)) == ("", "", [ToolCall("f", unclosed)])
    tagged = "<tool_call><function=weather><parameter=city>a\nb</par"
    call = ToolCall("weather", '{"city": "a\\nb</par')
    assert parsed(named("function-tags"), list(tagged)) == ("", "", [call])
    odd = "<tool_call><function=weather><parameter=city>a</parameter>odd</function></tool_call>"
    call = ToolCall("weather", '{"city": "a"')
    assert parsed(named("function-tags"), list(odd)) == ("odd</function>", "", [call])


@each_calling
def test_arguments_are_told_as_they_come(dialect: Dialect) -> None:
    parser = ReplyParser(dialect, TOOLS, prompt=opened(dialect))
    told: list[str] = []
    for letter in spelled_call(dialect, "weather", {"city": "x" * 50})[:-1]:
        told += [e.text for e in parser.push(letter) if isinstance(e, CallArguments)]
    # Nested tags and keyed lists say too late what belongs to what.
    assert (len(told) > 40) == (dialect.name not in {"nested-tags", "keyed-list", "python-list"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": [1, {"b": "c,d"}], "e": "f"}', {"a": [1, {"b": "c,d"}], "e": "f"}),
        ('{"a": [1, {"b": "c,d', {"a": [1, {}]}),
        ('{"a": 1, "b": tru', {"a": 1}),
        ('{"a": "x\\"}', {}),
        ('{"a": 1, oops, "b": 2}', {"a": 1}),
        ("", {}),
        ("[1]", {}),
        ("{" * 100_000, {}),
    ],
)
def test_objects_as_far_as_they_go(text: str, found: dict[str, object]) -> None:
    assert object_of(text) == found


def test_text_around_calls() -> None:
    call = spelled_call(named("json-tags"), "noon", {})
    content, _, calls = parsed(named("json-tags"), list(f"before\n\n{call}\n{call}\nafter\n"))
    assert content == "beforeafter\n"
    assert len(calls) == 2


@pytest.mark.parametrize("start", ["<|start|>assistant", ""])
def test_messages_with_headers(start: str) -> None:
    text = (
        "<|channel|>analysis<|message|>think<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.noon<|channel|>commentary json<|message|>{"x": "<|call|>"}'
    )
    content, reasoning, calls = parsed(named("harmony"), list(text), prompt=start)
    assert (content, reasoning) == ("I look.", "think")
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("noon", {"x": "<|call|>"})]


def test_a_recipient_before_the_channel() -> None:
    text = " to=functions.noon<|channel|>commentary json<|message|>{}<|call|>"
    assert parsed(named("harmony"), [text], prompt="<|start|>assistant")[2][0].name == "noon"


def test_calls_of_the_same_marker_follow_one_another() -> None:
    text = "[TOOL_CALLS]noon[ARGS]{}[TOOL_CALLS]weather[ARGS]{}"
    assert len(parsed(named("bracket-arguments"), list(text))[2]) == 2


def test_json_at_the_beginning_only() -> None:
    text = '{"name": "noon", "parameters": {}}'
    assert parsed(named("bare-json"), list(text))[2][0].name == "noon"
    assert parsed(named("bare-json"), list("so " + text)) == ("so " + text, "", [])


def test_kept_ids() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.noon:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    content, _, calls = parsed(named("pipe-sections"), list(text))
    assert (content, calls[0].name, calls[0].id) == ("", "noon", "functions.noon:3")


def test_calls_in_the_middle_of_reasoning_end_it() -> None:
    call = spelled_call(named("pipe-sections"), "noon", {})
    content, reasoning, calls = parsed(named("pipe-sections"), list(f"<think>so {call}"))
    assert (content, reasoning, len(calls)) == ("", "so", 1)


@each
def test_no_marker_begins_another(dialect: Dialect) -> None:
    openings = [call.opening for call in dialect.calls] + [m for p in dialect.reasoning for m in p]
    openings += dialect.dropped
    assert not [(a, b) for a in openings for b in openings if a != b and b.startswith(a)]


def test_values_take_their_schema() -> None:
    text = (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n<arg_key>other</arg_key>\n"
        "<arg_value>[1]</arg_value></tool_call>"
    )
    call = parsed(named("key-value-tags"), [text], tools=TOOLS)[2][0]
    assert json.loads(call.arguments) == {"city": "12", "days": 12, "other": [1]}
