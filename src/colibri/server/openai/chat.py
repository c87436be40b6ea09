"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.bodies import Body, Sampling, only, stop_strings
from colibri.server.openai.envelope import failure, new_id, usage
from colibri.server.openai.messages import (
    Message,
    ResponseFormat,
    Tool,
    answer_of,
    message_of,
    thinking_of,
    tool_choice_of,
    tool_of,
)
from colibri.server.problems import FieldError
from colibri.server.prompts import Conversation, chat_prompt
from colibri.server.replies import Delta, Ended, Output, Prompted, Replies, TokenLogprob, Totals
from colibri.server.serving import Call, totals_of
from colibri.server.streams import SSE_ALIVE, SSE_TYPE, Stream, progress, sse
from colibri.text import MAX_STOP_STRINGS
from colibri.text.dialects import CallArguments, CallBegun, Channel, Event, TextDelta


class StreamOptions(Body):
    """What a stream holds besides the reply."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatBody(Sampling, kw_only=True):
    """The request; fields after `seed` of `Sampling` are those of OpenAI and usual extensions."""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None

    def check(self) -> None:
        """Refuse what is known and not supported."""
        only("store", self.store, False)
        only("service_tier", self.service_tier, "auto", "default")
        only("modalities", self.modalities, ["text"])
        only("verbosity", self.verbosity, "medium")
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is given, but stream is not true")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "is given, but logprobs is not true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise FieldError("max_tokens", "and max_completion_tokens exclude each other")

    def conversation(self) -> Conversation:
        """What is asked, in the terms that all APIs share."""
        tools = self.tools or []
        return Conversation(
            messages=[message_of(message, i) for i, message in enumerate(self.messages)],
            tools=[tool_of(t.function, f"tools[{i}].function") for i, t in enumerate(tools)],
            parallel=self.parallel_tool_calls is not False,
            variables=self.chat_template_kwargs or {},
            answer=answer_of(self.response_format, self.regex, self.grammar),
            **tool_choice_of(self.tool_choice),
            **thinking_of(self.reasoning_effort, self.enable_thinking),
        )

    def length(self) -> int | None:
        """New tokens at most."""
        name = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
        length: int | None = getattr(self, name)
        if length is not None and length < 1:
            raise FieldError(name, f"is {length}: at least 1")
        return length


async def chat(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = call.read(ChatBody)
    body.check()
    call.serving.model.check_name(body.model)
    stops = stop_strings(body.stop, MAX_STOP_STRINGS, "stop")
    stop_ids = [*(body.stop_ids or ()), *(body.stop_token_ids or ())]
    replies = await call.begin(
        chat_prompt(call.serving.model, body.conversation()),
        {**body.sampling(), "max_tokens": body.length(), "stop_ids": stop_ids},
        stop=stops,
        n=1 if body.n is None else body.n,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    writer = ChatWriter(call, body)
    if body.stream:
        limits = call.serving.limits
        return Stream(
            writer.chunks(replies),
            media_type=SSE_TYPE,
            failure=failure,
            alive=SSE_ALIVE,
            quiet_s=limits.quiet_s,
        )
    return JSONResponse(writer.whole(await call.all_of(replies), replies.ask.request.n))


@dataclass
class _Whole:
    """A reply that is put together from its pieces."""

    texts: dict[Channel, str] = field(default_factory=lambda: dict.fromkeys(Channel, ""))
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class ChatWriter:
    """Spells outputs as OpenAI's chat does."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        self._id = new_id("chatcmpl-")
        self._model = call.serving.model
        self._created = call.created
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._num_calls: dict[int, int] = {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
        }

    def whole(self, outputs: list[Output], n: int) -> dict[str, Any]:
        """The answer where it is not streamed: the same pieces, put together."""
        replies = [_Whole() for _ in range(n)]
        for output in outputs:
            match output:
                case Delta():
                    self._add(replies[output.choice], output)
                case Ended():
                    replies[output.choice].reason = output.reason
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(i, reply) for i, reply in enumerate(replies)],
            "usage": usage(totals_of(outputs)),
        }

    def _add(self, reply: _Whole, delta: Delta) -> None:
        reply.logprobs += delta.logprobs
        for event in delta.events:
            match event:
                case TextDelta():
                    reply.texts[event.channel] += event.text
                case CallBegun():
                    reply.calls.append(self._tool_call(event))
                case CallArguments():
                    reply.calls[-1]["function"]["arguments"] += event.text

    def _choice(self, index: int, reply: _Whole) -> dict[str, Any]:
        content, reasoning = reply.texts[Channel.CONTENT], reply.texts[Channel.REASONING]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reply.calls and not content else content,
            "refusal": None,
        }
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": reply.calls} if reply.calls else {}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": reply.reason,
        }

    async def chunks(self, replies: Replies) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        for index in range(replies.ask.request.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for output in replies.outputs():
            match output:
                case Delta():
                    for piece in self._deltas(output):
                        yield piece
                case Prompted():
                    yield progress(output.done, output.total)
                case Ended():
                    yield self._chunk(output.choice, {}, reason=output.reason)
                case Totals() if self._has_usage:
                    end = {"choices": [], "usage": usage(output)}
                    yield sse({**self._head("chat.completion.chunk"), **end})
        yield sse("[DONE]")

    def _deltas(self, delta: Delta) -> Iterable[bytes]:
        logprobs = delta.logprobs
        for event in delta.events:
            yield self._chunk(delta.choice, self._spelled(delta.choice, event), logprobs)
            logprobs = ()
        if logprobs:
            yield self._chunk(delta.choice, {"content": ""}, logprobs)

    def _spelled(self, choice: int, event: Event) -> dict[str, Any]:
        match event:
            case TextDelta():
                name = "content" if event.channel is Channel.CONTENT else "reasoning_content"
                return {name: event.text}
            case CallBegun():
                self._num_calls[choice] = self._num_calls.get(choice, 0) + 1
                piece = self._tool_call(event)
            case CallArguments():
                piece = {"function": {"arguments": event.text}}
        return {"tool_calls": [{"index": self._num_calls[choice] - 1, **piece}]}

    def _tool_call(self, call: CallBegun) -> dict[str, Any]:
        return {
            "id": call.id or new_call_id(self._model.dialect.short_ids),
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Iterable[TokenLogprob] = (),
        reason: str | None = None,
    ) -> bytes:
        found = list(logprobs)
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(found) if found else None,
            "finish_reason": reason,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return sse({**chunk, "usage": None} if self._has_usage else chunk)

    def _logprobs(self, found: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {"content": [_spelled_logprob(one) for one in found], "refusal": None}


def _spelled_logprob(found: TokenLogprob) -> dict[str, Any]:
    top = [TokenLogprob(data, logprob) for data, logprob in found.top]
    return {**_token(found), "top_logprobs": [_token(one) for one in top]}


def _token(found: TokenLogprob) -> dict[str, Any]:
    return {"token": found.text, "logprob": found.logprob, "bytes": list(found.data)}


def new_call_id(short: bool) -> str:
    """An identifier for a call whose syntax has none; some templates take nine letters only."""
    return new_id("")[:9] if short else new_id("call_")
