"""Bodies of requests: strict JSON, every field known, every value of its type."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info

from colibri.server.problems import FieldError, Problem

T = TypeVar("T")
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$")


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies: a field that is not declared is refused by name."""


class Open(msgspec.Struct, kw_only=True):
    """Base of parts that clients send back as they got them: other fields say nothing new."""


def decode(raw: bytes, kind: type[T]) -> T:
    """Read a body.

    Raises:
        Problem: it is no JSON object, or a key stands twice.
        FieldError: a field is unknown, missing, or of a wrong type.
    """
    return convert(parse(raw), kind)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Problem: it is none.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise Problem(400, "the body is nested too deeply", None, "invalid_json") from None
    except ValueError as error:
        raise Problem(400, f"the body is no valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        found = type(value).__name__
        raise Problem(400, f"the body holds a {found}, not an object", None, "invalid_json")
    if b"\\u" in raw:  # nothing else can spell half a letter
        _check_text(value)
    return value


def _check_text(value: object) -> None:
    """Refuse half of a surrogate pair, wherever it stands."""
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        place, found = waiting.pop()
        match found:
            case dict():
                if not all(map(_is_text, found)):
                    raise FieldError(place or "body", "has a key that is no valid Unicode")
                waiting += [(f"{place}.{key}" if place else key, v) for key, v in found.items()]
            case list():
                waiting += [(f"{place}[{i}]", v) for i, v in enumerate(found)]
            case str() if not _is_text(found):
                raise FieldError(place, "is no valid Unicode: half of a surrogate pair")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def convert(value: object, kind: type[T], place: str = "") -> T:
    """A JSON value as a type; `place` is where it stands in the body.

    Raises:
        FieldError: a field is unknown, missing, or of a wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
    path = _PATH.search(message)
    message = _PATH.sub("", message)
    where = ".".join(filter(None, [place, path[1] if path else ""]))
    unknown = _UNKNOWN.match(message)
    if unknown is not None:
        raise FieldError(".".join(filter(None, [where, unknown[1]])), _advice(unknown[1], kind))
    missing = re.match(r"Object missing required field `(.*)`", message)
    if missing is not None:
        raise FieldError(".".join(filter(None, [where, missing[1]])), "is missing")
    raise FieldError(where or "body", _told(message, value, kind, path[1] if path else ""))


_WRONG = re.compile(r"Expected `([^`]*)`, got `(\w+)`$")
_WORDS = {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false",
          "array": "a list", "object": "an object", "null": "null"}  # fmt: skip


def _told(message: str, value: object, kind: type[Any], path: str) -> str:
    """What is wrong with a value, in JSON's words; others than these are readable as they are."""
    wrong = _WRONG.match(message)
    if wrong is not None:
        wanted = [_WORDS.get(word, word) for word in wrong[1].split(" | ") if word != "null"]
        return f"is {_WORDS.get(wrong[2], wrong[2])}: {' or '.join(wanted)} is wanted"
    if message.startswith("Invalid enum value "):
        allowed = _allowed(type_info(kind), _STEP.findall(path))
        choice = f"it must be {' or '.join(allowed)}" if allowed else "it is not known here"
        return f"is {message.removeprefix('Invalid enum value ')}: {choice}"
    return message


_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def _allowed(kind: Type, steps: list[str]) -> list[str]:
    """The words that a type takes at a place within it."""
    match kind:
        case UnionType():
            return [word for each in kind.types for word in _allowed(each, steps)]
        case LiteralType() if not steps:
            return [repr(value) for value in kind.values]
        case ListType() if steps:
            return _allowed(kind.item_type, steps[1:])
        case StructType() if steps:
            found = (f.type for f in kind.fields if f.encode_name == steps[0])
            return [word for each in found for word in _allowed(each, steps[1:])]
    return []


def _advice(name: str, kind: type[Any]) -> str:
    fields = getattr(kind, "__struct_fields__", ())
    near = difflib.get_close_matches(name, fields, 1)
    return f"is not supported{f'; did you mean {near[0]}?' if near else ''}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


class Sampling(Body):
    """The sampler's fields, alike in all APIs that have them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """What was given, by the names of `SamplingParams`."""
        given = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(k): v for k, v in self.logit_bias.items()}
        return given


def _token(key: str) -> int:
    if not key.isdecimal():
        raise FieldError("logit_bias", f"{key!r} is no token id")
    return int(key)


def stop_strings(stop: str | list[str] | None, limit: int | None, name: str) -> tuple[str, ...]:
    """Stop strings as they were given; an empty string alone, or an empty list, is none.

    Raises:
        FieldError: there are more than `limit`, or an empty one among others.
    """
    given = [stop] if isinstance(stop, str) else list(stop or ())
    if given == [""]:
        return ()
    if limit is not None and len(given) > limit:
        raise FieldError(name, f"holds {len(given)} strings, at most {limit} are allowed")
    for index, text in enumerate(given):
        if not text:
            raise FieldError(f"{name}[{index}]", "is empty: a text is wanted")
    return tuple(given)


def only(name: str, value: object, *allowed: object) -> None:
    """Refuse a field whose other values are not supported.

    Raises:
        FieldError: it is given, and none of the allowed values.
    """
    if value is not None and not any(value is a or value == a for a in allowed):
        shown = ", ".join(json.dumps(a) for a in allowed)
        raise FieldError(name, f"is not supported{f'; only {shown} is' if allowed else ''}")
