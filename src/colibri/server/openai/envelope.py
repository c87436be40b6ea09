"""How OpenAI's API spells problems, usage and identifiers."""

from __future__ import annotations

import secrets
from typing import Any

from colibri.server.problems import Problem
from colibri.server.replies import Totals
from colibri.server.streams import sse

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def envelope(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is no success."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": problem.message,
            "type": _KINDS.get(problem.status, kind),
            "param": problem.field,
            "code": problem.code,
        }
    }


def failure(problem: Problem) -> bytes:
    """A problem in the middle of a stream."""
    return sse(envelope(problem))


def usage(totals: Totals) -> dict[str, Any]:
    """What chat and completions report."""
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.total_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
    }


def new_id(prefix: str) -> str:
    """An identifier that nobody else has."""
    return f"{prefix}{secrets.token_hex(12)}"
