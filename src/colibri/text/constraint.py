"""Replies held to a language, token by token, by llguidance: JSON schemas, regexes, grammars.

It is built where the engine runs: what a request carries is a small mapping, one of

    {"json_schema": {…}}    {"json_object": true}    {"regex": "…"}    {"grammar": "start: …"}

and perhaps `"prefix"`: an expression in the grammar language for what comes before, reasoning for
instance. Grammars are in llguidance's Lark dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri.errors import RequestError
from colibri.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "json_object", "regex", "grammar")
# Between two parts of JSON: nothing, a blank, or a line end and its indentation. A model that may
# write any number of blanks can go on writing them.
WHITESPACE = r"(?: |\n[ \t]{0,32})?"
_MAX_COMPILED = 32


class Constraint:
    """The state of one reply in its language."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self) -> NDArray[np.bool_]:
        """`[V]` which ids may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(self._vocab_size, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(known)] = known
        return allowed

    def accept(self, token: int) -> None:
        """`token` comes next.

        Raises:
            RequestError: it was not allowed, or the grammar has become too large to go on with.
        """
        if not self._matcher.consume_token(token):
            reason = self._matcher.get_error() or "not allowed here"
            raise RequestError(f"the constraint cannot go on after token {token}: {reason}")

    def forced(self) -> Sequence[int]:
        """Ids that must follow now, as far as that is known without the model."""
        return [] if self.is_finished else self._matcher.compute_ff_tokens()

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()


class Constraints:
    """Builds constraints for one vocabulary; compiled ones are kept for the next request."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """Args as follow.

        Args:
            tokenizer: the checkpoint's.
            vocab_size: V of the model, which may be padded.
            eos_ids: ids that end a reply.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def __call__(self, spec: Mapping[str, Any]) -> Constraint:
        """The constraint of a new reply.

        Raises:
            RequestError: the specification is none, or what it says cannot be enforced.
        """
        return Constraint(self._compiled(grammar_of(spec)).deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        error = matcher.get_error()
        if error:
            raise RequestError(f"the constraint cannot be enforced: {error.splitlines()[0]}")
        return matcher

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_ids))
        return LLTokenizer(wrapped, eos_token=self._eos_ids or None)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance tries bytes first, and goes by the error
            raise TypeError("a text is wanted")
        return self._tokenizer.encode(text, at_start=False)


def grammar_of(spec: Mapping[str, Any]) -> str:
    """What llguidance compiles.

    Raises:
        RequestError: it is not exactly one of the kinds, or its value has a wrong type.
    """
    given = [kind for kind in spec if kind in KINDS]
    if len(given) != 1 or not spec.keys() <= {*KINDS, "prefix"}:
        raise RequestError(f"constraint holds {sorted(spec)}: give one of {', '.join(KINDS)}")
    answer = _answer(given[0], spec[given[0]])
    prefix = spec.get("prefix")
    if prefix is None:
        return json.dumps({"grammars": [answer]})
    start = {"name": "reply", "lark_grammar": f"start: {prefix}"}
    rules = start["lark_grammar"].split("\n", 1)
    start["lark_grammar"] = "\n".join([f"{rules[0]} @answer", *rules[1:]])
    return json.dumps({"grammars": [start, {"name": "answer", **answer}]})


def _answer(kind: str, value: object) -> dict[str, Any]:
    match kind, value:
        case "json_schema", dict():
            return {"json_schema": with_whitespace(value)}
        case "json_object", True:
            return {"json_schema": with_whitespace({"type": "object"})}
        case "regex", str():
            return {"lark_grammar": f"start: /{_escaped(value)}/"}
        case "grammar", str():
            return {"lark_grammar": value}
    raise RequestError(f"{kind} is {value!r}: it has a wrong type")


def with_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that says how much may stand between two parts of JSON."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **(own or {})}}


def _escaped(regex: str) -> str:
    """A regex between slashes."""
    escaped, after_backslash = [], False
    for letter in regex:
        if letter == "/" and not after_backslash:
            escaped.append("\\")
        escaped.append({"\n": "\\n", "\r": "\\r"}.get(letter, letter))
        after_backslash = letter == "\\" and not after_backslash
    return "".join(escaped)
