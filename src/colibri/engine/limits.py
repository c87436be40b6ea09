"""What the engine may do with the model, and what of it is left for a reply."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.errors import ContextLengthError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine may do with the model.

    Attributes:
        vocab_size: V; ids are below it.
        context_length: positions of a session.
        prefill_chunk: prompt tokens in one pass.
        max_sessions: replies that are computed together.
        max_waiting: requests that may wait beside them.
        max_stall_s: how long a pass with prompt tokens should take while replies are decoded.
        eos_ids: the model's own end-of-turn ids.
        ram_budget_bytes: for reports.
        lossy: likewise, see `Metrics`.
        max_context_length: what `context_length` could be raised to; None where it is not known.
    """

    vocab_size: int
    context_length: int
    prefill_chunk: int
    max_sessions: int = 1
    max_waiting: int = 64
    max_stall_s: float = 2.0
    eos_ids: frozenset[int] = frozenset()
    ram_budget_bytes: int = 0
    lossy: tuple[str, ...] = ()
    max_context_length: int | None = None


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
