"""The decode loop."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

import numpy as np

from colibri.engine.forward import Cancelled, Progress
from colibri.engine.prefill import prefill
from colibri.engine.request import FinishReason
from colibri.engine.sampler import Sampler
from colibri.engine.session import Session
from colibri.errors import Cancelled as CancelledError
from colibri.errors import ContextLengthError


def decode(
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_tokens: int,
    stop_ids: Collection[int],
    chunk: int,
    cancelled: Cancelled,
    progress: Progress | None = None,
) -> Generator[int, None, FinishReason]:
    """Yield the reply's tokens one by one, a stop id included; return why it ended.

    `prompt` is what the session does not hold yet. A token is run only when the one after it is
    asked for, so whoever stops asking computes nothing in vain.
    """
    if max_tokens == 0:
        return FinishReason.LENGTH
    try:
        logits = prefill(session, prompt, chunk, progress=progress, cancelled=cancelled)
        for left in range(max_tokens - 1, -1, -1):
            token = sampler.choose(logits)
            yield token
            if token in stop_ids:
                return FinishReason.STOP
            if left == 0:
                return FinishReason.LENGTH
            if cancelled():
                return FinishReason.CANCELLED
            logits = session.extend(np.asarray([token], np.int32), ROW_0, cancelled=cancelled)[0]
    except CancelledError:
        return FinishReason.CANCELLED
    raise AssertionError("unreachable")


ROW_0 = np.zeros(1, np.int32)


def tokens_allowed(
    prompt_tokens: int, max_tokens: int | None, context_length: int, most: int | None = None
) -> int:
    """How many tokens the reply may have: `max_tokens`, by default the rest of the context.

    `most` is the longest context that the model could have, where that is known.

    Raises:
        ContextLengthError: the prompt fills the context, or `max_tokens` does not fit behind it.
    """
    room = context_length - prompt_tokens
    if room < (1 if max_tokens is None else max_tokens):
        tokens = f"{prompt_tokens:,} token{'' if prompt_tokens == 1 else 's'}"
        advice = f"ask for at most {room:,} (max_tokens)" if room > 0 else "shorten it"
        if most is None or most > context_length:
            advice += f", or raise context_length{f' (at most {most:,})' if most else ''}"
        raise ContextLengthError(
            f"the prompt has {tokens}, the context holds {context_length:,}: {advice}"
        )
    return room if max_tokens is None else max_tokens
