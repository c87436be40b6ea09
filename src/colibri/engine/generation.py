"""One reply being made: an iterator over its token ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import Self

from colibri.engine.messages import Event, Tokens
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, SamplingParams
from colibri.engine.task import Task

Ids = Generator[int, None, FinishReason | None]


class Inbox:
    """What becomes of a request with one reply, until somebody looks.

    Attributes:
        fresh: new ids.
        error: what ended it.
    """

    def __init__(self, tell: Callable[[Event], None] | None = None) -> None:
        """`tell` sees every event too."""
        self.fresh: deque[int] = deque()
        self.error: Exception | None = None
        self._tell = tell

    def tell(self, event: Event) -> None:
        """See `Listener`."""
        if isinstance(event, Tokens):
            self.fresh.extend(event.token_ids)
        if self._tell is not None:
            self._tell(event)

    def fail(self, error: Exception) -> None:
        """See `Listener`."""
        self.error = error


class Generation:
    """Iterate over it for the ids. Whoever leaves early calls `close`, or uses it in a `with`.

    Attributes:
        params: what holds for it: everything filled in, the seed drawn, the model's own end-of-turn
            ids among `stop_ids`.
        token_ids: new ids so far.
        finish_reason: None until it ended.
    """

    def __init__(
        self,
        task: Task,
        ids: Ids,
        settle: Callable[[], None],
        memory: Callable[[Metrics], Metrics],
    ) -> None:
        """`settle` books what passes have cost, `memory` adds what the process has."""
        self.params: SamplingParams = task.request.params
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._task, self._ids = task, ids
        self._settle, self._memory = settle, memory

    @property
    def prompt_tokens(self) -> int:
        """Ids of the prompt."""
        return len(self._task.prompt)

    @property
    def reused_tokens(self) -> int:
        """Prompt ids whose state was still there."""
        return self._task.spent.reused_tokens

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        try:
            token = next(self._ids)
        except StopIteration as end:
            self.finish_reason = end.value or self.finish_reason
            raise StopIteration from None
        self.token_ids.append(token)
        return token

    def close(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End it here: nothing more is computed, and what it borrowed is given back."""
        if self.finish_reason is None:
            self.finish_reason = reason
        self._ids.close()

    @property
    def metrics(self) -> Metrics:
        """What this reply cost, and what memory the process has.

        Ids that nobody has asked for are not counted.
        """
        shown = len(self.token_ids)
        if not self._task.is_over:
            self._settle()
        metrics = self._task.metrics
        counted = replace(metrics, completion_tokens=shown, decode_tokens=max(0, shown - 1))
        return self._memory(counted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
