"""`/v1/responses`: a reply as items, each with a life of its own in a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.bodies import Body, convert, only
from colibri.server.openai.chat import new_call_id
from colibri.server.openai.envelope import envelope, new_id
from colibri.server.openai.messages import USUAL_EFFORT, Function, tool_of
from colibri.server.openai.responses_input import (
    FunctionTool,
    NamedFunction,
    TextConfig,
    messages_of,
)
from colibri.server.problems import FieldError, Problem
from colibri.server.prompts import Conversation, chat_prompt
from colibri.server.replies import Delta, Ended, EndReason, Output, Replies, Totals
from colibri.server.serving import Call
from colibri.server.streams import SSE_ALIVE, SSE_TYPE, Stream, sse
from colibri.text.dialects import CallArguments, CallBegun, Channel, Event

_ARGUMENTS = "response.function_call_arguments"


class Reasoning(Body):
    """How much to reason; summaries are not made, the reasoning itself is shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Body):
    """The request."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    conversation: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Refuse what is known and not supported."""
        only("store", self.store, False)
        only("truncation", self.truncation, "disabled")
        only("service_tier", self.service_tier, "auto", "default")
        only("previous_response_id", self.previous_response_id)
        only("background", self.background, False)
        only("top_logprobs", self.top_logprobs, 0)
        only("max_tool_calls", self.max_tool_calls)
        only("conversation", self.conversation)
        only("prompt", self.prompt)
        for index, name in enumerate(self.include or ()):
            only(f"include[{index}]", name, "reasoning.encrypted_content")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise FieldError("max_output_tokens", f"is {self.max_output_tokens}: at least 1")

    def asked(self) -> Conversation:
        """What is asked, in the terms that all APIs share."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(
            messages=messages_of(self.input, self.instructions),
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            parallel=self.parallel_tool_calls is not False,
            thinking=False if effort == "none" else None,
            effort=None if effort == "none" else effort,
            usual_effort=USUAL_EFFORT,
            answer=None if self.text is None else self.text.answer(),
            **_choice(self.tool_choice),
        )


def _tool(tool: FunctionTool, place: str) -> dict[str, Any]:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    return tool_of(function, place)


def _choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise FieldError("tool_choice", f"is {value!r}: auto, none, required or a function")
        return {"tool_choice": value}
    named = convert(value, NamedFunction, "tool_choice")
    return {"tool_choice": "required", "tool_name": named.name}


async def responses(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = call.read(ResponsesBody)
    body.check()
    call.serving.model.check_name(body.model)
    replies = await call.begin(
        chat_prompt(call.serving.model, body.asked()),
        {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_tokens": body.max_output_tokens,
        },
    )
    writer = Writer(call, body, replies)
    if body.stream:
        return Stream(
            writer.stream(),
            media_type=SSE_TYPE,
            failure=writer.failure,
            alive=SSE_ALIVE,
            quiet_s=call.serving.limits.quiet_s,
        )
    return JSONResponse(writer.whole(await call.all_of(replies)))


class Writer:
    """Spells outputs as items."""

    def __init__(self, call: Call, body: ResponsesBody, replies: Replies) -> None:
        self._body = body
        self._replies = replies
        self._model = call.serving.model
        self._created = call.created
        self._id = new_id("resp_")
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._number = 0
        self._reason = EndReason.STOP

    def _response(self, status: str, totals: Totals | None = None, **more: Any) -> dict[str, Any]:
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model.name,
            "output": list(self._items),
            "usage": None if totals is None else _usage(totals),
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": self._replies.params.temperature,
            "top_p": self._replies.params.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                {"type": "function", "name": t.name, "description": t.description,
                 "parameters": t.parameters, "strict": t.strict}
                for t in body.tools or ()
            ],
            "store": False,
            "truncation": "disabled",
            **more,
        }  # fmt: skip

    def _status(self) -> str:
        return "incomplete" if self._reason is EndReason.LENGTH else "completed"

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer where it is not streamed: what the stream would have told at its end."""
        last: dict[str, Any] = {}
        for output in outputs:
            for kind, data in self._told(output):
                last = data if kind.startswith(("response.completed", "response.inc")) else last
        found: dict[str, Any] = last["response"]
        return found

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})
        async for output in self._replies.outputs():
            for kind, data in self._told(output):
                yield self._event(kind, data)

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **data}, kind)

    def failure(self, problem: Problem) -> bytes:
        """A problem in the middle of the stream."""
        error = envelope(problem)["error"]
        told = {"code": problem.code or error["type"], "message": problem.message}
        return self._event("response.failed", {"response": self._response("failed", error=told)})

    def _told(self, output: Output) -> Iterator[tuple[str, dict[str, Any]]]:
        match output:
            case Delta():
                for event in output.events:
                    yield from self._add(event)
            case Ended():
                self._reason = output.reason
            case Totals():
                yield from self._close()
                status = self._status()
                yield f"response.{status}", {"response": self._response(status, output)}

    def _add(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(event, CallBegun):
            yield from self._close()
            yield self._open_call(event)
            return
        if isinstance(event, CallArguments):
            item = self._items[-1]
            item["arguments"] += event.text
            yield f"{_ARGUMENTS}.delta", {**self._call_place(), "delta": event.text}
            return
        kind = "message" if event.channel is Channel.CONTENT else "reasoning"
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        part = self._items[-1]["content"][0]
        part["text"] += event.text
        yield f"response.{_text_kind(kind)}.delta", {**self._place(), "delta": event.text,
                                                     **_no_logprobs(kind)}  # fmt: skip

    def _place(self) -> dict[str, Any]:
        return {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }

    def _open(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        self._is_open = True
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"id": new_id("msg_"), "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            item |= {"id": new_id("rs_"), "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._items.append({**item, "content": []})
        index = len(self._items) - 1
        yield (
            "response.output_item.added",
            {"output_index": index, "item": {**item, "content": []}},
        )
        self._items[-1]["content"].append(part)
        yield "response.content_part.added", {**self._place(), "part": dict(part)}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "function_call":
            yield from self._close_call(item)
            return
        part = item["content"][0]
        item["status"] = self._status()
        text = {"text": part["text"], **_no_logprobs(item["type"])}
        yield f"response.{_text_kind(item['type'])}.done", {**self._place(), **text}
        yield "response.content_part.done", {**self._place(), "part": dict(part)}
        yield (
            "response.output_item.done",
            {"output_index": len(self._items) - 1, "item": dict(item)},
        )

    def _open_call(self, call: CallBegun) -> tuple[str, dict[str, Any]]:
        self._is_open = True
        item = {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": call.id or new_call_id(self._model.dialect.short_ids),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        place = {"output_index": len(self._items) - 1, "item": dict(item)}
        return "response.output_item.added", place

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _close_call(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        item["status"] = self._status()
        told = {"name": item["name"], "arguments": item["arguments"]}
        yield f"{_ARGUMENTS}.done", {**self._call_place(), **told}
        place = {"output_index": len(self._items) - 1, "item": dict(item)}
        yield "response.output_item.done", place


def _text_kind(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _no_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _usage(totals: Totals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
        "total_tokens": totals.total_tokens,
    }
