"""What may be asked of a generation, checked once at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from colibri.errors import RequestError

MAX_SEED = 2**64 - 1
_ANY_COUNT = 2**63 - 1


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"  # an end-of-turn id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"


class _Range(NamedTuple):
    """The numbers a field takes; `open_low` leaves the lower end itself out."""

    low: float
    high: float
    open_low: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        low = f"{'more than' if self.open_low else 'at least'} {self.low}"
        return f"{low} and at most {self.high}" if math.isfinite(self.high) else f"{low} and finite"


_FLOATS = {
    "temperature": _Range(0, math.inf),
    "top_p": _Range(0, 1),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, math.inf, open_low=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
}
_COUNTS = {
    "top_k": _Range(0, _ANY_COUNT),
    "max_tokens": _Range(0, _ANY_COUNT),
    "seed": _Range(0, MAX_SEED),
}
_REQUEST_COUNTS = {"n": _Range(1, _ANY_COUNT), "top_logprobs": _Range(0, 20)}
_OPTIONAL = {"max_tokens", "seed", "top_logprobs"}
_BIAS = _Range(-100, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. The defaults are greedy decoding.

    Attributes:
        temperature: divides the logits; 0 takes the largest one (ties to the lowest id).
        top_p: keep the most likely tokens whose probabilities reach this sum; 0 keeps one.
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens at least this probable relative to the most probable one.
        repetition_penalty: divides positive and multiplies negative logits of every token of
            prompt and reply (Keskar et al. 2019, section 4.1).
        presence_penalty: subtracted from the logits of tokens that are in the reply.
        frequency_penalty: subtracted once for each time a token is in the reply.
        logit_bias: added to the logits of these ids; at least -100 and at most 100.
        seed: of this request's own random numbers; None draws one.
        max_tokens: new tokens at most; None is the rest of the context.
        stop_ids: ids that end the reply beside the model's own.
        ignore_eos: go on after the model's own end-of-turn ids.

    Raises:
        RequestError: a value of a wrong type or out of its range, named.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, bounds in _FLOATS.items():
            _check_float(name, getattr(self, name), bounds)
        for name, bounds in _COUNTS.items():
            _check_count(name, getattr(self, name), bounds)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}: it must be true or false")
        if not all(_is_int(token) and token >= 0 for token in self.stop_ids):
            raise RequestError(f"stop_ids is {self.stop_ids!r}: it must hold token ids, from 0 on")
        _check_bias(self.logit_bias)

    def as_dict(self) -> dict[str, Any]:
        """Every field by name, for reports."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What an engine is asked for: ids in, ids out.

    Attributes:
        prompt: token ids.
        params: how tokens are chosen.
        n: replies to the same prompt, which is computed once. Reply 0 is the one that `n = 1`
            gives; each has random numbers of its own.
        top_logprobs: None for no log probabilities; k for those of each chosen token and of the k
            likeliest. They are of the model's own distribution: before penalties, biases,
            temperature, filters and constraint.
        constraint: what the replies are restricted to, as the engine's `ConstraintFactory` reads
            it; None for nothing.
        marks: positions of the prompt, ascending, where a later prompt may turn off: behind system
            and tools, behind each turn. Models with recurrent state remember it there; for all
            others they say nothing.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    top_logprobs: int | None = None
    constraint: dict[str, Any] | None = None
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, bounds in _REQUEST_COUNTS.items():
            _check_count(name, getattr(self, name), bounds)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_float(name: str, value: object, bounds: _Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}: it must be a number, {bounds}")
    if not math.isfinite(value) or not bounds.holds(value):
        raise RequestError(f"{name} is {value!r}: it must be {bounds}")


def _check_bias(value: object) -> None:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias is {value!r}: it must map token ids to numbers")
    for token, bias in value.items():
        if not _is_int(token) or token < 0:
            raise RequestError(f"logit_bias has a key {token!r}: keys must be token ids, from 0 on")
        _check_float(f"logit_bias[{token}]", bias, _BIAS)


def _check_count(name: str, value: object, bounds: _Range) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}: it must be a whole number, {bounds}")
    if not bounds.holds(value):
        raise RequestError(f"{name} is {value!r}: it must be {bounds}")
