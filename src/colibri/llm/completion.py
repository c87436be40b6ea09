"""Replies: whole, or piece by piece. The pieces always add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from colibri.engine.generation import Generation
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, SamplingParams
from colibri.text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply.

    Attributes:
        text: what this piece adds to the text, perhaps nothing; None without a tokenizer.
        token_ids: what it adds to the ids: one, or none at the very end.
        finish_reason: why the reply ended; only the last chunk has one.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A reply.

    Attributes:
        text: the reply without stop ids and stop strings; None without a tokenizer.
        token_ids: the new ids only, a stop id included.
        finish_reason: why it ended.
        stop: the stop string that ended it.
        prompt_tokens: ids of the prompt.
        completion_tokens: `len(token_ids)`.
        params: what held for it: every value filled in, the seed that was drawn, all stop ids.
        metrics: times and expert traffic of this reply alone; memory is that of the process.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    params: SamplingParams
    metrics: Metrics


class ReplyText:
    """Text of a reply's tokens, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] | None) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Text that may be shown after this token."""
        return self._stops.push(self._detokenizer.push(token))[0]

    def finish(self) -> str:
        """Text that was held back, once the reply has ended."""
        return self._stops.push(self._detokenizer.finish())[0] + self._stops.finish()


class Stream:
    """Iterate over it for the chunks. Leaving early ends the reply; `completion` is what there is.

    Where it outlives the loop over it, use it in a `with`, or `close` it.
    """

    def __init__(
        self,
        generation: Generation,
        text: ReplyText | None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """`ended` is called once, when the reply has ended in whatever way."""
        self._generation = generation
        self._text = text
        self._shown: list[str] = []
        chunks = self._run(generation, text, self._shown)
        self._chunks = chunks if ended is None else _then(chunks, ended)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @staticmethod
    def _run(
        generation: Generation, text: ReplyText | None, shown: list[str]
    ) -> Generator[Chunk, None, None]:
        """Bound to nothing, so that a stream which nobody holds any more ends at once."""
        with generation:
            for token in generation:
                delta = None
                if text is not None:
                    delta = "" if token in generation.params.stop_ids else text.push(token)
                    shown.append(delta)
                    if text.matched is not None:
                        generation.close(FinishReason.STOP)
                        yield Chunk(delta, (token,), FinishReason.STOP)
                        return
                yield Chunk(delta, (token,))
        rest = None
        if text is not None:
            rest = text.finish()
            shown.append(rest)
        yield Chunk(rest, (), generation.finish_reason)

    def close(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the reply here; what it borrowed is given back."""
        self._generation.close(reason)
        self._chunks.close()

    @property
    def completion(self) -> Completion:
        """The reply so far; unfinished ones count as cancelled."""
        generation = self._generation
        return Completion(
            text=None if self._text is None else "".join(self._shown),
            token_ids=list(generation.token_ids),
            finish_reason=generation.finish_reason or FinishReason.CANCELLED,
            stop=self._text.matched if self._text is not None else None,
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=len(generation.token_ids),
            params=replace(generation.params),
            metrics=generation.metrics,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _then(
    chunks: Generator[Chunk, None, None], ended: Callable[[], None]
) -> Generator[Chunk, None, None]:
    try:
        yield from chunks
    finally:
        ended()
