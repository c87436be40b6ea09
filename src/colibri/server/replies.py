"""The one path of generation: from ids and parameters to events of text, for every endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from colibri.engine.messages import Done, Finished, Logprobs, Prefill, Tokens
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, GenerateRequest
from colibri.engine.service import Reply
from colibri.server.prompts import Prompt
from colibri.text import Tokenizer
from colibri.text.dialects import CallBegun, Event
from colibri.text.reply import ReplyReader


class EndReason(StrEnum):
    """Why a reply ended, as clients see it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's bytes and log probability, and those of the likeliest in its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()

    @property
    def text(self) -> str:
        """The token as text."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one reply."""

    choice: int
    events: tuple[Event, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """One reply has ended; `stop` is the stop string that did it."""

    choice: int
    reason: EndReason
    stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All replies have ended."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    metrics: Metrics

    @property
    def total_tokens(self) -> int:
        """Prompt and replies."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Prompted:
    """So many tokens of the prompt are done, of all that it has; not told of the last ones."""

    done: int
    total: int


Output: TypeAlias = Delta | Ended | Totals | Prompted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as every endpoint puts it.

    Attributes:
        prompt: what goes to the engine, and how its replies are read.
        request: what the engine is asked.
        stop: stop strings; they are looked for in content, not in reasoning and not in tool calls.
    """

    prompt: Prompt
    request: GenerateRequest
    stop: tuple[str, ...] = ()


@dataclass
class _Choice:
    """One of the replies that are being made."""

    text: ReplyReader | None
    num_tokens: int = 0
    num_reasoning: int = 0
    has_calls: bool = False
    has_ended: bool = False
    waiting: list[TokenLogprob] = field(default_factory=list)


class Replies:
    """The replies to one request, as they come; use it in `async with`."""

    def __init__(self, ask: Ask, reply: Reply, tokenizer: Tokenizer | None) -> None:
        self.ask = ask
        self.params = reply.params
        self._reply = reply
        self._tokenizer = tokenizer
        self._choices = [self._new_choice() for _ in range(ask.request.n)]

    def _new_choice(self) -> _Choice:
        if self._tokenizer is None:
            return _Choice(None)
        prompt = self.ask.prompt
        reader = ReplyReader(
            self._tokenizer,
            prompt.dialect,
            tools=prompt.tools,
            prompt=prompt.tail,
            stop=self.ask.stop,
        )
        return _Choice(reader)

    async def outputs(self) -> AsyncIterator[Output]:
        """What there is to tell, in order; `Totals` is the last."""
        async for event in self._reply:
            match event:
                case Prefill() if event.done < event.total:
                    yield Prompted(event.done, event.total)
                case Tokens():
                    for output in self._tokens(event):
                        yield output
                case Finished():
                    for output in self._finished(event):
                        yield output
                case Done():
                    yield self._totals(event.metrics)

    def _tokens(self, event: Tokens) -> list[Output]:
        choice = self._choices[event.choice]
        events: list[Event] = []
        taken: list[int] = []
        for index, token in enumerate(event.token_ids):
            if choice.has_ended:
                break
            taken.append(token)
            choice.num_tokens += 1
            was_content = choice.text is None or choice.text.is_content
            events += self._push(choice, token)
            if event.logprobs is not None and was_content:
                self._note(choice, token, event.logprobs[index])
        if not events and not taken:
            return []
        outputs: list[Output] = [self._delta(event.choice, choice, events, taken)]
        if choice.text is not None and choice.text.matched is not None and not choice.has_ended:
            choice.has_ended = True
            self._reply.cancel(event.choice, FinishReason.STOP)
            outputs.append(Ended(event.choice, EndReason.STOP, choice.text.matched))
        return outputs

    def _push(self, choice: _Choice, token: int) -> list[Event]:
        if choice.text is None or token in self.params.stop_ids:
            return []
        choice.num_reasoning += not choice.text.is_content
        return choice.text.push(token)

    def _note(self, choice: _Choice, token: int, found: Logprobs) -> None:
        """Keep a log probability for the next delta; only content has them."""
        if token in self.params.stop_ids or (choice.text and not choice.text.is_content):
            return
        top = tuple((self._bytes(id), logprob) for id, logprob in found.top)
        choice.waiting.append(TokenLogprob(self._bytes(token), found.chosen, top))

    def _bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _delta(self, index: int, choice: _Choice, events: list[Event], ids: list[int]) -> Delta:
        choice.has_calls |= any(isinstance(event, CallBegun) for event in events)
        waiting, choice.waiting = tuple(choice.waiting), []
        return Delta(index, tuple(events), tuple(ids), waiting)

    def _finished(self, event: Finished) -> list[Output]:
        choice = self._choices[event.choice]
        if choice.has_ended:
            return []
        choice.has_ended = True
        outputs: list[Output] = []
        rest = [] if choice.text is None else choice.text.finish()
        if rest:
            outputs.append(self._delta(event.choice, choice, rest, []))
        stop = None if choice.text is None else choice.text.matched
        reason = EndReason(event.reason) if stop is None else EndReason.STOP
        if reason is EndReason.STOP and choice.has_calls:
            reason = EndReason.TOOL_CALLS
        return [*outputs, Ended(event.choice, reason, stop)]

    def _totals(self, metrics: Metrics) -> Totals:
        return Totals(
            prompt_tokens=len(self.ask.request.prompt),
            cached_tokens=metrics.reused_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            reasoning_tokens=sum(choice.num_reasoning for choice in self._choices),
            metrics=metrics,
        )
