"""Replies that are held to a language: masks, forced ids, ends, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.errors import RequestError
from colibri.text import Tokenizer
from colibri.text.constraint import Constraint, Constraints
from colibri.text.dialects import Dialect
from colibri.text.dialects.demanded import call_grammar, reasoning_prefix
from tests.unit.llm.fakes import BOS, END_THINK, EOS, THINK, write_tokenizer
from tests.unit.text.dialects.replies import (
    ARGUMENTS,
    CALLING,
    DIALECTS,
    TOOLS,
    opened,
    parsed,
    spelled_call,
)

VOCAB = 300  # padded beyond the tokenizer's
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("constraint")
    write_tokenizer(directory)
    loaded = Tokenizer.load(directory)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer, VOCAB, [EOS])


def walk(constraint: Constraint, seed: int = 0) -> bytes:
    """A reply of a model that likes everything alike."""
    random, reply = np.random.RandomState(seed), b""
    for _ in range(400):
        forced = list(constraint.forced())
        for token in forced:
            constraint.accept(token)
        reply += bytes(forced)
        if constraint.is_finished:
            return reply
        allowed = np.flatnonzero(constraint.mask())
        token = int(random.choice(allowed))
        if token == EOS:
            return reply
        constraint.accept(token)
        reply += bytes([token])
    raise AssertionError("the reply does not end")


@pytest.mark.parametrize("seed", range(5))
def test_replies_follow_a_schema(constraints: Constraints, seed: int) -> None:
    value = json.loads(walk(constraints({"json_schema": SCHEMA}), seed))
    assert value.keys() == {"city", "days"}
    assert value["city"] in ("Oslo", "Rome")
    assert isinstance(value["days"], int)


def test_a_reply_that_is_all_forced(constraints: Constraints) -> None:
    constraint = constraints({"json_schema": {"const": {"a": [1, "x"]}}})
    assert json.loads(walk(constraint)) == {"a": [1, "x"]}


@pytest.mark.parametrize(
    ("spec", "reply"),
    [
        ({"regex": "a/b\\n[0-9]{2}"}, b"a/b\n00"),
        ({"grammar": 'start: "x" y\ny: "z"'}, b"xz"),
        ({"regex": "yes|yeah"}, b"ye"),
    ],
)
def test_regexes_and_grammars(constraints: Constraints, spec: dict[str, Any], reply: bytes) -> None:
    constraint = constraints(spec)
    for byte in reply:
        assert constraint.mask()[byte]
        constraint.accept(byte)


def test_masks_cover_the_models_vocabulary(constraints: Constraints) -> None:
    mask = constraints({"json_object": True}).mask()
    assert mask.shape == (VOCAB,)
    assert mask.nonzero()[0].tolist() == [ord("{")]


def test_compiled_constraints_do_not_share_their_state(constraints: Constraints) -> None:
    one, two = (constraints({"regex": "ab"}) for _ in range(2))
    one.accept(ord("a"))
    assert two.mask().nonzero()[0].tolist() == [ord("a")]


def test_the_end_of_turn_is_allowed_where_the_reply_may_end(constraints: Constraints) -> None:
    constraint = constraints({"regex": "[0-9]+"})
    assert not constraint.mask()[EOS]
    constraint.accept(ord("1"))
    assert constraint.mask()[EOS]
    assert not constraint.mask()[BOS]
    constraint.accept(EOS)
    assert constraint.is_finished


@pytest.mark.parametrize(
    "spec",
    [
        {}, {"yaml": 1}, {"regex": 5}, {"json_schema": "x"}, {"json_object": False},
        {"regex": "a", "grammar": "b"}, {"regex": "a", "other": 1}, {"regex": "("},
        {"grammar": "start: ("}, {"json_schema": {"type": "nonsense"}},
        {"json_schema": {"if": {"type": "object"}}},
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(constraints: Constraints, spec: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        constraints(spec)


def test_a_token_that_is_not_allowed_is_an_error(constraints: Constraints) -> None:
    with pytest.raises(RequestError, match="after token 98"):
        constraints({"regex": "a"}).accept(ord("b"))


def named(name: str) -> Dialect:
    return next(dialect for dialect in DIALECTS if dialect.name == name)


def accepts(constraint: Constraint, ids: list[int]) -> bool:
    """Whether a reply of these ids may end there."""
    for token in ids:
        if not constraint.mask()[token]:
            return False
        constraint.accept(token)
    return constraint.is_finished or bool(constraint.mask()[EOS])


@pytest.mark.parametrize(
    ("prompt", "reply", "is_accepted"),
    [
        ("", "12", True),
        ("", "<think>so 3</think>\n\n12", True),
        ("", "<think>so 3", False),
        ("<think>\n", "so</think>12", True),
        ("<think>\n", "12", False),
        ("<think>\n\n</think>\n\n", "12", True),
        ("<think>\n\n</think>\n\n", "<think>1</think>12", False),
    ],
)
def test_reasoning_before_an_answer(
    tokenizer: Tokenizer, constraints: Constraints, prompt: str, reply: str, is_accepted: bool
) -> None:
    prefix = reasoning_prefix(named("json-tags"), tokenizer, prompt)
    constraint = constraints({"regex": "[0-9]+", "prefix": prefix} if prefix else {"regex": "1.*"})
    assert accepts(constraint, tokenizer.encode(reply, special=True)) == is_accepted


@pytest.mark.parametrize("name", ["json-tags", "harmony"])
def test_an_answer_without_reasoning(
    tokenizer: Tokenizer, constraints: Constraints, name: str
) -> None:
    dialect = named(name)
    prompt = opened(dialect)
    prefix = reasoning_prefix(dialect, tokenizer, prompt, may_reason=False)
    spec = {"regex": "[0-9]+", **({"prefix": prefix} if prefix else {})}
    grammar = call_grammar(
        dialect, tokenizer, TOOLS, prompt=prompt, parallel=False, may_reason=False
    )
    think = "<think>so</think>"
    if dialect.header:
        think = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    call = spelled_call(dialect, "weather", ARGUMENTS)
    for held, answer in [(spec, f"{dialect.answer}12"), ({"grammar": grammar}, call)]:
        assert accepts(constraints(held), tokenizer.encode(answer, special=True))
        assert not accepts(constraints(held), tokenizer.encode(think + answer, special=True))


def test_an_answer_with_a_header(tokenizer: Tokenizer, constraints: Constraints) -> None:
    prefix = reasoning_prefix(named("harmony"), tokenizer, "<|start|>assistant")
    spec = {"regex": "[0-9]+", "prefix": prefix}
    think = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>12"
    for reply, is_accepted in [(final, True), (think + final, True), ("12", False)]:
        assert accepts(constraints(spec), tokenizer.encode(reply, special=True)) == is_accepted


@pytest.mark.parametrize("dialect", CALLING, ids=lambda d: d.name)
def test_demanded_calls(dialect: Dialect, tokenizer: Tokenizer, constraints: Constraints) -> None:
    tools = {name: {**schema, "required": ["city"]} for name, schema in TOOLS.items()}
    tools["noon"] = {"type": "object", "properties": {}, "additionalProperties": False}
    prompt = opened(dialect)
    grammar = call_grammar(dialect, tokenizer, tools, prompt=prompt, parallel=True)
    call = spelled_call(dialect, "weather", ARGUMENTS)
    ids = tokenizer.encode(call, special=True)
    assert accepts(constraints({"grammar": grammar}), ids)
    assert not accepts(constraints({"grammar": grammar}), tokenizer.encode("I will not."))
    assert parsed(dialect, [call], prompt=opened(dialect))[2]


def test_control_tokens_of_a_demanded_call_are_tokens(
    tokenizer: Tokenizer, constraints: Constraints
) -> None:
    grammar = call_grammar(named("json-tags"), tokenizer, TOOLS, prompt="", parallel=False)
    constraint = constraints({"grammar": grammar})
    assert constraint.mask()[THINK]
    constraint.accept(THINK)
    assert constraint.mask()[END_THINK]


def test_calls_that_cannot_be_demanded(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        call_grammar(named("braced"), tokenizer, TOOLS, prompt="", parallel=True)
