"""`/v1/completions`: text is continued as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.bodies import Sampling, only, stop_strings
from colibri.server.openai.chat import StreamOptions
from colibri.server.openai.envelope import failure, new_id, usage
from colibri.server.openai.messages import ResponseFormat, answer_of
from colibri.server.problems import FieldError
from colibri.server.prompts import Prompt, raw_prompt
from colibri.server.replies import Delta, Ended, Output, Prompted, Replies, TokenLogprob, Totals
from colibri.server.serving import Call, totals_of
from colibri.server.streams import SSE_ALIVE, SSE_TYPE, Stream, progress, sse
from colibri.text import MAX_STOP_STRINGS
from colibri.text.dialects import TextDelta


class CompletionBody(Sampling, kw_only=True):
    """The request."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Refuse what is known and not supported."""
        only("suffix", self.suffix, "")
        only("best_of", self.best_of, 1, self.n)
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is given, but stream is not true")
        if self.echo and self.logprobs is not None:
            raise FieldError("echo", "and logprobs exclude each other: prompts are not scored")
        if self.echo and not isinstance(self.one_prompt, str):
            raise FieldError("echo", "is for prompts that are text")

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt; lists of one are common."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return ids
        if len(prompt) > 1 or isinstance(prompt[0], int):
            raise FieldError("prompt", f"holds {len(prompt)} prompts: one a request")
        return prompt[0]


async def completions(call: Call) -> ASGIApp:
    """Continue a text."""
    body = call.read(CompletionBody)
    body.check()
    call.serving.model.check_name(body.model)
    prompt = constrained(
        raw_prompt(call.serving.model, body.one_prompt),
        answer_of(body.response_format, body.regex, body.grammar),
    )
    replies = await call.begin(
        prompt,
        {
            **body.sampling(),
            "max_tokens": body.max_tokens,
            "stop_ids": [*(body.stop_ids or ()), *(body.stop_token_ids or ())],
        },
        stop=stop_strings(body.stop, MAX_STOP_STRINGS, "stop"),
        n=1 if body.n is None else body.n,
        top_logprobs=body.logprobs,
    )
    writer = CompletionWriter(call, body)
    if body.stream:
        return Stream(
            writer.chunks(replies),
            media_type=SSE_TYPE,
            failure=failure,
            alive=SSE_ALIVE,
            quiet_s=call.serving.limits.quiet_s,
        )
    return JSONResponse(writer.whole(await call.all_of(replies), replies.ask.request.n))


def constrained(prompt: Prompt, answer: dict[str, Any] | None) -> Prompt:
    """A prompt whose replies are held to a language."""
    return prompt if answer is None else replace(prompt, constraint=answer)


class CompletionWriter:
    """Spells outputs as OpenAI's completions do."""

    def __init__(self, call: Call, body: CompletionBody) -> None:
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": call.created,
            "model": call.serving.model.name,
        }
        self._echo = str(body.one_prompt) if body.echo else ""
        self._has_logprobs = body.logprobs is not None
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._offsets: dict[int, int] = {}

    def whole(self, outputs: list[Output], n: int) -> dict[str, Any]:
        """The answer where it is not streamed."""
        texts = [self._echo] * n
        found: list[list[TokenLogprob]] = [[] for _ in range(n)]
        reasons: list[str | None] = [None] * n
        for output in outputs:
            match output:
                case Delta():
                    texts[output.choice] += text_of(output)
                    found[output.choice] += output.logprobs
                case Ended():
                    reasons[output.choice] = output.reason
        choices = [self._choice(i, texts[i], found[i], reasons[i]) for i in range(n)]
        return {**self._head, "choices": choices, "usage": usage(totals_of(outputs))}

    async def chunks(self, replies: Replies) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        if self._echo:
            for index in range(replies.ask.request.n):
                yield self._chunk(self._choice(index, self._echo, [], None))
        async for output in replies.outputs():
            match output:
                case Delta():
                    text = text_of(output)
                    if text or output.logprobs:
                        found = list(output.logprobs)
                        yield self._chunk(self._choice(output.choice, text, found, None))
                case Prompted():
                    yield progress(output.done, output.total)
                case Ended():
                    yield self._chunk(self._choice(output.choice, "", [], output.reason))
                case Totals() if self._has_usage:
                    yield sse({**self._head, "choices": [], "usage": usage(output)})
        yield sse("[DONE]")

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        return sse({**chunk, "usage": None} if self._has_usage else chunk)

    def _choice(
        self, index: int, text: str, found: list[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, found) if self._has_logprobs else None,
            "finish_reason": reason,
        }

    def _logprobs(self, index: int, found: list[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for one in found:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(one.text)
        return {
            "tokens": [one.text for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [
                {data.decode("utf-8", "replace"): logprob for data, logprob in one.top}
                for one in found
            ],
            "text_offset": offsets,
        }


def text_of(delta: Delta) -> str:
    """The text of a delta."""
    return "".join(event.text for event in delta.events if isinstance(event, TextDelta))
