"""Conversations that `/save` writes down and `/load` goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri.errors import RequestError

_ROLES = ("system", "user", "assistant")


def write_conversation(name: str, messages: Sequence[Mapping[str, Any]]) -> Path:
    """Write messages to a file, whole or not at all; return its path.

    Raises:
        RequestError: it cannot be written, or holds something that is no conversation.
    """
    path = Path(name).expanduser()
    beside = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not _is_conversation(path):
            raise RequestError(f"{path} holds something else: name another file")
        text = json.dumps({"messages": messages}, indent=1, ensure_ascii=False)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {_why(error)}") from None
    return path


def _is_conversation(path: Path) -> bool:
    try:
        read_conversation(str(path))
    except RequestError:
        return False
    return True


def read_conversation(name: str) -> list[dict[str, Any]]:
    """Messages that `/save` wrote.

    Raises:
        RequestError: the file holds something else, or cannot be read.
    """
    path = Path(name).expanduser()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {_why(error)}") from None
    except (ValueError, RecursionError):
        found = None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise RequestError(f"{path} holds no conversation: name a file that /save wrote")
    return [dict(message) for message in messages]


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
    )


def _why(error: OSError) -> str:
    """An error of the system in words, without its number."""
    return (error.strerror or str(error)).lower()
