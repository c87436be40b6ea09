"""What went wrong, in HTTP's terms; each API puts it into an envelope of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping

from colibri.errors import (
    BusyError,
    ColibriError,
    ContextLengthError,
    EngineDiedError,
    RequestError,
    ShuttingDownError,
    TextError,
)

_log = logging.getLogger("colibri.server")
_RETRY_S = 5  # after an engine died: it is being started again
_FIELD = re.compile(r"([a-z_]+)(\[\d+\])? (?:is|holds|must|cannot|has)\b")


class FieldError(RequestError):
    """A field of the body that is not honoured.

    Attributes:
        field: its path, such as `messages[0].content`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclasses.dataclass(frozen=True, slots=True)
class Problem(Exception):  # noqa: N818  (it is what an error becomes)
    """An answer that is no success.

    Attributes:
        status: of HTTP.
        message: for people.
        field: of the body that is at fault.
        code: a word for machines.
        headers: further ones.
    """

    status: int
    message: str
    field: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def problem_of(error: Exception) -> Problem:
    """What an error is in HTTP's terms; an error that is none of ours is logged."""
    text = str(error)
    match error:
        case Problem():
            return error
        case FieldError():
            return Problem(400, text, error.field, "invalid_value")
        case ContextLengthError():
            return Problem(400, text, None, "context_length_exceeded")
        case RequestError():
            found = _FIELD.match(text)
            return Problem(400, text, found[1] if found else None, "invalid_value")
        case TextError():
            return Problem(400, text, "messages", "invalid_value")
        case BusyError():
            return Problem(429, text, None, "busy", retry_after(error.retry_after_s))
        case ShuttingDownError():
            return Problem(503, text, None, "shutting_down", retry_after(_RETRY_S))
        case EngineDiedError():
            return Problem(503, text, None, "engine_died", retry_after(_RETRY_S))
        case ColibriError():
            return Problem(500, text, None, "engine_error")
    _log.error("a request failed: this should not happen, please report it", exc_info=error)
    return Problem(500, f"{type(error).__name__}: {error}", None, "internal_error")


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to ask again."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}
