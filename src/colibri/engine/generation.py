"""One reply being made: an iterator over its token ids that keeps time and books."""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import perf_counter
from types import TracebackType
from typing import Self

from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.request import FinishReason, SamplingParams

Tokens = Generator[int, None, FinishReason]


class Generation:
    """Iterate over it for the ids. Whoever leaves early calls `close`, or uses it in a `with`.

    Attributes:
        params: what holds for it: the seed drawn, the model's own end-of-turn ids among `stop_ids`.
        prompt_tokens: ids of the prompt.
        token_ids: new ids so far.
        finish_reason: None until it ended.
        reused_tokens: prompt ids whose state the session still held.
    """

    def __init__(
        self,
        run: Callable[[Generation], Tokens],
        params: SamplingParams,
        prompt_tokens: int,
        counts: Callable[[], ExpertCounts],
        done: Callable[[Metrics], None],
        memory: Callable[[Metrics], Metrics] = lambda metrics: metrics,
    ) -> None:
        self.params = params
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.reused_tokens = 0
        self._requested = perf_counter()
        self._ttft_s = self._prefill_s = self._decode_s = 0.0
        self._counts = counts
        self._before: ExpertCounts | None = None
        self._experts = ExpertCounts()
        self._tokens = run(self)
        self._done, self._memory = done, memory
        self._ended = False

    def begin(self, reused_tokens: int) -> None:
        """Say that its turn has come: traffic and time count from here on."""
        self._before = self._counts()
        self._started = perf_counter()
        self.reused_tokens = reused_tokens

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self._started = perf_counter()
        try:
            token = next(self._tokens)
        except StopIteration as end:
            self._clock()
            if end.value is not None:
                self.finish_reason = end.value
            self._end()
            raise StopIteration from None
        except BaseException:
            self._end()
            raise
        self._clock()
        self.token_ids.append(token)
        return token

    def _clock(self) -> None:
        now = perf_counter()
        if self.token_ids:
            self._decode_s += now - self._started
        else:
            self._ttft_s = now - self._requested
            self._prefill_s = now - self._started

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._before is not None:
            self._experts = self._counts() - self._before
            self._done(self.metrics)

    def close(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End it here: nothing more is computed, and what it borrowed is given back."""
        if self.finish_reason is None:
            self.finish_reason = reason
        self._tokens.close()
        self._end()

    @property
    def metrics(self) -> Metrics:
        """What this reply cost, and what memory the process has."""
        own = Metrics(
            num_requests=1,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            completion_tokens=len(self.token_ids),
            decode_tokens=max(0, len(self.token_ids) - 1),
            ttft_s=self._ttft_s,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            experts=self._experts,
        )
        return self._memory(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
