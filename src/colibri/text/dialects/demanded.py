"""Grammars for what a request demands of a reply: a tool call, or an answer after reasoning.

They are in llguidance's Lark dialect. What a dialect spells with control tokens is matched by these
tokens (`<[7]>`), all else letter by letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from colibri.errors import RequestError
from colibri.text.constraint import with_whitespace
from colibri.text.dialects.dialect import Dialect, Header, Tools
from colibri.text.tokenizer import Tokenizer

_PLACES = re.compile(r"(\$(?:name|json|arguments|key|value|type|string))")
_BLANKS = r"/[ \n]{0,4}/"  # not any number: some models would never stop


def reasoning_prefix(
    dialect: Dialect,
    tokenizer: Tokenizer,
    prompt: str,
    budget: int | None = None,
    *,
    may_reason: bool = True,
) -> str | None:
    """What may come before an answer, as a prefix of a constraint; None for nothing.

    Args:
        dialect: how replies are spelled.
        tokenizer: the checkpoint's.
        prompt: how the rendered prompt ends: reasoning that it has opened must be closed; other
            reasoning may be.
        budget: tokens of reasoning at most; then it is closed.
        may_reason: whether reasoning that the prompt has not opened is allowed.

    Raises:
        RequestError: the budget cannot be enforced.
    """
    grammar = _Grammar(tokenizer, budget)
    header = dialect.header
    if header is not None:
        return _header_prefix(dialect, grammar, prompt, may_reason)
    open_end = dialect.reasoning_end(prompt)
    if open_end is not None:
        answer = grammar.literal(dialect.answer)
        return grammar.text(f"{grammar.reasoning(open_end)} {_BLANKS} {answer}")
    if not dialect.reasoning:
        return None
    opening, closing = dialect.reasoning[0]
    if prompt.rstrip().endswith(closing.rstrip()):
        return None
    answer = grammar.literal(dialect.answer)
    if not may_reason:
        return grammar.text(answer) or None
    first = f"({grammar.literal(opening)} {grammar.reasoning(closing)} {_BLANKS})?"
    return grammar.text(f"{first} {answer}")


def _header_prefix(
    dialect: Dialect, grammar: _Grammar, prompt: str, may_reason: bool
) -> str | None:
    header = dialect.header
    if header is None or not header.is_open(prompt) or not dialect.answer:
        return None
    if not may_reason:
        return grammar.text(grammar.literal(dialect.answer))
    return grammar.text(f"{_thoughts(header, grammar)} {grammar.literal(dialect.answer)}")


def _thoughts(header: Header, grammar: _Grammar) -> str:
    """A message of reasoning, perhaps, and the opening of the next one."""
    if not header.thinks:
        return ""
    again = grammar.literal(f"{header.openings[0]}assistant")
    return f"({grammar.literal(header.thinks)} {grammar.reasoning(header.ends[0])} {again})?"


def any_answer(dialect: Dialect, tokenizer: Tokenizer) -> str:
    """An answer that is held to nothing: any text and the dialect's own control tokens."""
    ids = sorted(tokenizer.ids_within(dialect.markers))
    return "start: any*\nany: " + " | ".join(["/(?s:.+)/", *(f"<[{id}]>" for id in ids)])


def call_grammar(
    dialect: Dialect,
    tokenizer: Tokenizer,
    tools: Tools,
    *,
    prompt: str,
    parallel: bool,
    budget: int | None = None,
    may_reason: bool = True,
) -> str:
    """A reply that calls at least one of the functions, each as its schema says.

    `parallel` allows further calls; `budget` and `may_reason` as for `reasoning_prefix`.

    Raises:
        RequestError: calls in this dialect cannot be demanded.
    """
    if dialect.written is None:
        raise RequestError(
            f"tool_choice cannot be enforced for tool calls that are spelled as {dialect.name}: "
            'leave it at "auto"'
        )
    grammar = _Grammar(tokenizer, budget)
    written, argument = dialect.written
    calls = [
        _written_call(grammar, written, (argument, dialect.separator), name, schema)
        for name, schema in tools.items()
    ]
    one = grammar.rule(" | ".join(calls))
    again = f"({_BLANKS} {one})*" if parallel and may_repeat(dialect) else ""
    before = _before_calls(dialect, grammar, prompt, may_reason)
    return grammar.text(f"start: {before} {one} {again}")


def may_repeat(dialect: Dialect) -> bool:
    """Whether another call can follow one."""
    return dialect.header is None and bool(dialect.calls[0].closings)


def _before_calls(dialect: Dialect, grammar: _Grammar, prompt: str, may_reason: bool) -> str:
    header, end = dialect.header, dialect.reasoning_end(prompt)
    if end is not None:
        return f"{grammar.reasoning(end)} {_BLANKS}"
    if not may_reason:
        return _BLANKS if header is None else ""
    if header is not None:
        return _thoughts(header, grammar)
    if not dialect.reasoning or prompt.rstrip().endswith(dialect.reasoning[0][1].rstrip()):
        return _BLANKS
    opening, closing = dialect.reasoning[0]
    return f"({grammar.literal(opening)} {grammar.reasoning(closing)})? {_BLANKS}"


def _written_call(
    grammar: _Grammar,
    written: str,
    argument: tuple[str, str],
    name: str,
    schema: Mapping[str, Any],
) -> str:
    parts = []
    for part in _PLACES.split(written):
        match part:
            case "$name":
                parts.append(grammar.literal(name))
            case "$json":
                parts.append(grammar.json(schema or {"type": "object"}))
            case "$arguments":
                parts.append(_arguments(grammar, *argument, schema))
            case _:
                parts.append(grammar.literal(part))
    return grammar.rule(" ".join(parts))


def _arguments(grammar: _Grammar, written: str, separator: str, schema: Mapping[str, Any]) -> str:
    """All arguments in their order, those aside that are not required."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    between = grammar.literal(separator)
    first = following = '""'  # where nothing is written yet, and where something is
    for key, inner in reversed(properties.items()):
        rule = _argument(grammar, written, key, inner if isinstance(inner, dict) else {})
        told = f"{rule} {following}"
        without = ("", "") if key in required else (f" | {first}", f" | {following}")
        first = grammar.rule(f"{told}{without[0]}")
        following = grammar.rule(f"{between} {told}{without[1]}") if separator else first
    return grammar.rule(first)


def _argument(grammar: _Grammar, written: str, key: str, schema: Mapping[str, Any]) -> str:
    is_text = schema.get("type") == "string" and "enum" not in schema
    words = [v for v in schema.get("enum", ()) if isinstance(v, str)]
    kind = {"integer": "number"}.get(str(schema.get("type")), schema.get("type"))
    before, after = written.split("$value")
    before = before.replace("$key", key).replace(
        "$type", kind if isinstance(kind, str) else "object"
    )
    before = before.replace("$string", str(is_text or bool(words)).lower())
    after = after.replace("$key", key)
    if not after:
        value = grammar.json(schema)
    elif words:
        value = "(" + " | ".join(map(grammar.literal, words)) + ") " + grammar.literal(after)
    elif is_text:
        value = grammar.until(after)
    else:
        value = f"{grammar.json(schema)} {grammar.literal(after)}"
    return grammar.rule(f"{grammar.literal(before)} {value}")


class _Grammar:
    """Rules as they are added."""

    def __init__(self, tokenizer: Tokenizer, budget: int | None = None) -> None:
        self._spellings = tokenizer.spellings
        self._budget = budget
        self._rules: list[str] = []

    def text(self, first: str) -> str:
        """All rules, behind the first."""
        return "\n".join([first.strip(), *self._rules])

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema."""
        return self.rule(f"%json {json.dumps(with_whitespace(schema))}")

    def literal(self, text: str) -> str:
        """A spelling, control tokens as such."""
        parts = []
        for _, plain, token in self._spellings.split(text):
            parts += [quoted(plain)] if plain else []
            parts += [f"<[{token.id}]>"] if token is not None else []
        return " ".join(parts)

    def reasoning(self, closing: str) -> str:
        """Reasoning and what closes it, within the budget."""
        if self._budget is None:
            return self.until(closing)
        if next(iter(self._spellings.split(closing)))[1]:
            raise RequestError(
                f"budget_tokens cannot be enforced: the vocabulary has no token for {closing!r}"
            )
        limited = self.rule("/(?s:.*)/", f"[max_tokens={self._budget}]")
        return f"{limited} {self.literal(closing)}"

    def until(self, marker: str) -> str:
        """Any text, and the marker that ends it."""
        _, plain, _token = next(iter(self._spellings.split(marker)))
        if plain:  # the rest of the marker follows literally
            lazy = self.rule("/(?s:.*)/", f"[suffix={quoted(plain)}]")
            return f"{lazy} {self.literal(marker[len(plain) :])}".strip()
        return f"{self.rule('/(?s:.*)/')} {self.literal(marker)}"


def quoted(text: str) -> str:
    """A string of the grammar language."""
    return json.dumps(text, ensure_ascii=False)
