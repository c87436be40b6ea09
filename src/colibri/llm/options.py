"""The arguments of a request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypedDict

from colibri.engine.constraint import ConstraintSpec
from colibri.engine.forward import Cancelled, Progress
from colibri.engine.request import SamplingParams
from colibri.engine.session import Session
from colibri.errors import RequestError

Stop = str | Sequence[str] | None


class RequestOptions(TypedDict, total=False):
    """What may be given with a prompt; None counts as not given.

    The first twelve are those of `SamplingParams`. The others:

    Attributes:
        stop: one string or several; the reply's text ends before the first that appears.
        session: from `LLM.open_session`; state is kept in it between requests.
        progress: called with the prompt's tokens that are done, and all of them.
        cancelled: asked between layers and tokens; true ends the reply.
        constraint: what the reply is held to, such as `{"json_schema": …}`, see `text.constraint`.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    stop_ids: Iterable[int] | None
    ignore_eos: bool | None
    stop: Stop
    session: Session | None
    progress: Progress | None
    cancelled: Cancelled
    constraint: ConstraintSpec | None


def check_names(sampling: Iterable[str]) -> None:
    """Refuse what is no field of `SamplingParams`.

    Raises:
        RequestError: an unknown name, with the nearest one.
    """
    known = [field.name for field in fields(SamplingParams)]
    for name in sampling:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "stop", "session", "constraint"], 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RequestError(f"unknown argument {name}: {hint}known are {', '.join(known)}, stop")
