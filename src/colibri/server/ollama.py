"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`: Ollama's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

import colibri
from colibri.server.bodies import only, stop_strings
from colibri.server.ollama_bodies import Asked, ChatBody, GenerateBody, Options, ShowBody
from colibri.server.openai.completions import constrained
from colibri.server.openai.messages import tool_of
from colibri.server.problems import Problem
from colibri.server.prompts import Conversation, Prompt, chat_prompt, raw_prompt
from colibri.server.replies import Delta, Ended, EndReason, Output, Replies, Totals
from colibri.server.serving import Call
from colibri.server.streams import LINES_TYPE, Stream, line
from colibri.text.dialects import CallArguments, CallBegun, Channel, Event, TextDelta, object_of
from colibri.text.dialects.events import ToolCall

_NS = 1_000_000_000


def envelope(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is no success."""
    return {"error": problem.message}


def failure(problem: Problem) -> bytes:
    """A problem in the middle of a stream."""
    return line(envelope(problem))


async def chat(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = call.read(ChatBody)
    body.check(call)
    call.serving.model.check_name(body.model)
    writer = Writer(call, lambda piece: {"message": {"role": "assistant", **_spelled(piece)}})
    if not body.messages:
        return writer.loaded()
    tools = body.tools or []
    conversation = Conversation(
        messages=[message.message(i) for i, message in enumerate(body.messages)],
        tools=[tool_of(t.function, f"tools[{i}].function") for i, t in enumerate(tools)],
        answer=body.answer(),
        **body.thinking(),
    )
    prompt = chat_prompt(call.serving.model, conversation)
    return await _answer(call, body, prompt, writer)


async def generate(call: Call) -> ASGIApp:
    """Answer a prompt: through the chat template where there is one, unless `raw`."""
    body = call.read(GenerateBody)
    body.check(call)
    call.serving.model.check_name(body.model)
    only("suffix", body.suffix, "")
    only("template", body.template, "")
    only("context", body.context, [])
    only("images", body.images, [])
    writer = Writer(call, _generated)
    if not body.prompt:
        return writer.loaded()
    return await _answer(call, body, _prompt(call, body), writer)


def _prompt(call: Call, body: GenerateBody) -> Prompt:
    model = call.serving.model
    if body.raw or model.template is None:
        only("system", body.system, "")
        only("think", body.think, False)
        return constrained(raw_prompt(model, body.prompt), body.answer())
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return chat_prompt(
        model, Conversation(messages=messages, answer=body.answer(), **body.thinking())
    )


async def _answer(call: Call, body: Asked, prompt: Prompt, writer: Writer) -> ASGIApp:
    options = body.options or Options()
    replies = await call.begin(
        prompt,
        options.sampling(),
        stop=stop_strings(options.stop, None, "options.stop"),
        caps=True,
    )
    if body.stream is False:
        return JSONResponse(writer.whole(await call.all_of(replies)))
    return Stream(writer.lines(replies), media_type=LINES_TYPE, failure=failure)


Piece: TypeAlias = TextDelta | ToolCall | None


def _pieces(outputs: Iterable[Event], held: list[ToolCall]) -> Iterator[Piece]:
    """Texts, and calls when they have ended: this API tells them whole. `held` is the last call."""
    for event in outputs:
        if isinstance(event, CallArguments):
            held[-1] = replace(held[-1], arguments=held[-1].arguments + event.text)
            continue
        yield from _ended(held)
        if isinstance(event, CallBegun):
            held.append(ToolCall(event.name, "", event.id))
        else:
            yield event


def _ended(held: list[ToolCall]) -> list[ToolCall]:
    """The call that has ended, if there is one."""
    ended = list(held)
    held.clear()
    return ended


def _spelled(piece: Piece) -> dict[str, Any]:
    if piece is None:
        return {"content": ""}
    if isinstance(piece, TextDelta):
        thinks = piece.channel is Channel.REASONING
        return {"content": "", "thinking": piece.text} if thinks else {"content": piece.text}
    call = {"function": {"name": piece.name, "arguments": object_of(piece.arguments)}}
    return {"content": "", "tool_calls": [call if piece.id is None else {"id": piece.id, **call}]}


def _generated(event: Piece) -> dict[str, Any]:
    spelled = _spelled(event)
    thinking = {"thinking": spelled["thinking"]} if "thinking" in spelled else {}
    return {"response": spelled["content"], **thinking}


class Writer:
    """Spells outputs as objects of one piece each."""

    def __init__(self, call: Call, spell: Callable[[Piece], dict[str, Any]]) -> None:
        self._name = call.serving.model.name
        self._spell = spell
        self._end = Ended(0, EndReason.STOP)

    def _head(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._name, "created_at": now}

    def loaded(self) -> ASGIApp:
        """The answer to a request without content, which asks for the model to be loaded."""
        end = {"done": True, "done_reason": "load"}
        return JSONResponse({**self._head(), **self._spell(None), **end})

    async def lines(self, replies: Replies) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        held: list[ToolCall] = []
        async for output in replies.outputs():
            match output:
                case Delta():
                    for piece in _pieces(output.events, held):
                        yield self._line(piece)
                case Ended():
                    self._end = output
                    for call in _ended(held):
                        yield self._line(call)
                case Totals():
                    yield line({**self._head(), **self._spell(None), **self._done(output)})

    def _line(self, piece: Piece) -> bytes:
        return line({**self._head(), **self._spell(piece), "done": False})

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer where it is not streamed: the same pieces, put together."""
        made = self._spell(None)
        end: dict[str, Any] = {}
        held: list[ToolCall] = []
        for output in outputs:
            match output:
                case Delta():
                    for piece in _pieces(output.events, held):
                        _join(made, self._spell(piece))
                case Ended():
                    self._end = output
                    for call in _ended(held):
                        _join(made, self._spell(call))
                case Totals():
                    end = self._done(output)
        return {**self._head(), **made, **end}

    def _done(self, totals: Totals) -> dict[str, Any]:
        metrics = totals.metrics
        return {
            "done": True,
            "done_reason": "length" if self._end.reason is EndReason.LENGTH else "stop",
            "total_duration": int((metrics.ttft_s + metrics.decode_s) * _NS),
            "load_duration": 0,
            "prompt_eval_count": totals.prompt_tokens,
            "prompt_eval_duration": int(metrics.prefill_s * _NS),
            "eval_count": totals.completion_tokens,
            "eval_duration": int(metrics.decode_s * _NS),
        }


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to what there is: texts and lists grow."""
    for key, value in piece.items():
        if isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif key == "role" or key not in whole:
            whole[key] = value
        else:
            whole[key] = whole[key] + value


async def tags(call: Call) -> ASGIApp:
    """List the model."""
    return JSONResponse({"models": [_described(call)]})


def _described(call: Call) -> dict[str, Any]:
    model = call.serving.model
    files = model.files
    written = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": written,
        "size": sum(path.stat().st_size for path in files),
        "digest": model.digest,
        "details": _details(call),
    }


def _details(call: Call) -> dict[str, Any]:
    family = call.serving.model.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


async def show(call: Call) -> ASGIApp:
    """Describe the model."""
    body = call.read(ShowBody)
    model = call.serving.model
    model.check_name(body.model or body.name)
    able = ["completion", *(["tools"] if model.offers_tools else [])]
    able += ["thinking"] if model.reasons else []
    template = "" if model.template is None else next(iter(model.template.sources.values()))
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(call),
            "model_info": {"general.architecture": "colibri",
                           "colibri.context_length": call.serving.context_length},
            "capabilities": able,
            "modified_at": _described(call)["modified_at"],
        }
    )  # fmt: skip


async def version(call: Call) -> ASGIApp:
    """Say the version of this server."""
    return JSONResponse({"version": colibri.__version__})
