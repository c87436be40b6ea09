"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.anthropic_messages import (
    ContextManagement,
    SystemBlock,
    ThinkingConfig,
    Tool,
    ToolChoice,
    Turn,
    conversation_of,
)
from colibri.server.bodies import Body, only, stop_strings
from colibri.server.openai.chat import new_call_id
from colibri.server.openai.envelope import new_id
from colibri.server.problems import FieldError, Problem
from colibri.server.prompts import Conversation, chat_prompt
from colibri.server.replies import Delta, Ended, EndReason, Output, Replies, Totals
from colibri.server.serving import Call
from colibri.server.streams import SSE_TYPE, Stream, sse
from colibri.text.dialects import CallArguments, CallBegun, Channel, Event, TextDelta, object_of

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def envelope(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is no success."""
    kind = _KINDS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def failure(problem: Problem) -> bytes:
    """A problem in the middle of a stream."""
    return sse(envelope(problem), "error")


class CountBody(Body):
    """What both endpoints are asked."""

    model: str
    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """What is asked, in the terms that all APIs share."""
        return conversation_of(
            self.messages, self.system, self.tools, self.tool_choice, self.thinking,
            self.output_config,
        )  # fmt: skip


class MessagesBody(CountBody, kw_only=True):
    """The request."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: str | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None

    def check(self) -> None:
        """Refuse what is known and not supported."""
        only("container", self.container)
        only("mcp_servers", self.mcp_servers, [])
        managed = self.context_management
        for index, edit in enumerate((managed.edits if managed else None) or ()):
            kept = {"type": "clear_thinking_20251015", "keep": "all"}  # nothing is to be cleared
            only(f"context_management.edits[{index}]", edit, kept)
        if self.max_tokens < 1:
            raise FieldError("max_tokens", f"is {self.max_tokens}: at least 1")

    def sampling(self) -> dict[str, Any]:
        """The sampler's fields."""
        names = ("temperature", "top_p", "top_k", "max_tokens")
        return {name: getattr(self, name) for name in names}


async def messages(call: Call) -> ASGIApp:
    """Answer a conversation; `max_tokens` is a bound, and the context another."""
    body = call.read(MessagesBody)
    body.check()
    call.serving.model.check_name(body.model)
    replies = await call.begin(
        chat_prompt(call.serving.model, body.conversation()),
        body.sampling(),
        stop=stop_strings(body.stop_sequences, None, "stop_sequences"),
        caps=True,
    )
    writer = Writer(call, replies, body.max_tokens)
    if body.stream:
        return Stream(
            writer.events(),
            media_type=SSE_TYPE,
            failure=failure,
            alive=sse({"type": "ping"}, "ping"),
            quiet_s=call.serving.limits.quiet_s,
        )
    return JSONResponse(writer.whole(await call.all_of(replies)))


async def count_tokens(call: Call) -> ASGIApp:
    """Say how many tokens a conversation has."""
    body = call.read(CountBody)
    call.serving.model.check_name(body.model)
    prompt = chat_prompt(call.serving.model, body.conversation())
    return JSONResponse({"input_tokens": len(prompt.ids)})


class Writer:
    """Spells outputs as messages of content blocks."""

    def __init__(self, call: Call, replies: Replies, max_tokens: int) -> None:
        self._replies = replies
        self._model = call.serving.model
        self._max_tokens = max_tokens
        self._id = new_id("msg_")
        self._index = -1
        self._kind: str | None = None
        self._end = Ended(0, EndReason.STOP)

    def _message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **more,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer where it is not streamed: its blocks, put together."""
        blocks: list[dict[str, Any]] = []
        usage: dict[str, Any] = {}
        for output in outputs:
            match output:
                case Delta():
                    for event in output.events:
                        self._add(blocks, event)
                case Ended():
                    self._end = output
                case Totals():
                    usage = self._usage(output)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = object_of(block["input"])
        return self._message(content=blocks, usage=usage, **self._stop(usage["output_tokens"]))

    def _add(self, blocks: list[dict[str, Any]], event: Event) -> None:
        if isinstance(event, CallBegun):
            blocks.append({**self._tool_use(event), "input": ""})
        elif isinstance(event, CallArguments):
            blocks[-1]["input"] += event.text
        else:
            block, delta = self._block(event)
            if not blocks or blocks[-1]["type"] != block["type"]:
                blocks.append(block)
            key = "text" if event.channel is Channel.CONTENT else "thinking"
            blocks[-1][key] += delta[key]

    def _tool_use(self, event: CallBegun) -> dict[str, Any]:
        id = event.id or new_call_id(self._model.dialect.short_ids).replace("call_", "toolu_")
        return {"type": "tool_use", "id": id, "name": event.name, "input": {}}

    def _block(self, event: TextDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        """An empty block of a text's kind, and the delta that fills it."""
        if event.channel is Channel.CONTENT:
            return {"type": "text", "text": ""}, {"type": "text_delta", "text": event.text}
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return block, {"type": "thinking_delta", "thinking": event.text}

    def _usage(self, totals: Totals) -> dict[str, Any]:
        return {
            "input_tokens": totals.prompt_tokens - totals.cached_tokens,
            "cache_read_input_tokens": totals.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": totals.completion_tokens,
        }

    def _stop(self, output_tokens: int) -> dict[str, Any]:
        if self._end.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._end.stop}
        full = output_tokens < self._max_tokens
        reasons = {
            EndReason.STOP: "end_turn",
            EndReason.TOOL_CALLS: "tool_use",
            EndReason.LENGTH: "model_context_window_exceeded" if full else "max_tokens",
        }
        return {"stop_reason": reasons.get(self._end.reason), "stop_sequence": None}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        start = {"input_tokens": len(self._replies.ask.request.prompt), "output_tokens": 0}
        yield _event("message_start", message=self._message(usage=start))
        async for output in self._replies.outputs():
            match output:
                case Delta():
                    for event in output.events:
                        for piece in self._pieces(event):
                            yield piece
                case Ended():
                    self._end = output
                case Totals():
                    for piece in self._close():
                        yield piece
                    usage = self._usage(output)
                    delta = self._stop(usage["output_tokens"])
                    yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def _pieces(self, event: Event) -> list[bytes]:
        if isinstance(event, CallBegun):
            return self._open(self._tool_use(event))
        if isinstance(event, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        block, delta = self._block(event)
        pieces = self._open(block) if block["type"] != self._kind else []
        return [*pieces, self._delta(delta)]

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        pieces = self._close()
        self._index += 1
        self._kind = block["type"]
        return [*pieces, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        pieces = []
        if self._kind == "thinking":
            pieces.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._kind = None
        return [*pieces, _event("content_block_stop", index=self._index)]


def _event(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)
