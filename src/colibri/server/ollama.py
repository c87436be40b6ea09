"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`: Ollama's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

import colibri
from colibri.server.bodies import Body, Open, only, stop_strings
from colibri.server.openai.completions import constrained
from colibri.server.openai.messages import Function, tool_of
from colibri.server.problems import FieldError, Problem
from colibri.server.prompts import Conversation, Prompt, chat_prompt, raw_prompt
from colibri.server.replies import Delta, Ended, EndReason, Output, Replies, Totals
from colibri.server.serving import Call
from colibri.server.streams import LINES_TYPE, Stream, line
from colibri.text.dialects import Channel, Event, TextDelta

_NS = 1_000_000_000


def envelope(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is no success."""
    return {"error": problem.message}


def failure(problem: Problem) -> bytes:
    """A problem in the middle of a stream."""
    return line(envelope(problem))


class Options(Body):
    """What the sampler is asked; what is not here is not supported."""

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> dict[str, Any]:
        """By the names of `SamplingParams`; negative lengths are no bound."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty",
                 "frequency_penalty")  # fmt: skip
        length = self.num_predict
        if length is not None and length < -2:
            raise FieldError("options.num_predict", f"is {length}: at least -2")
        return {
            **{name: getattr(self, name) for name in names},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": None if length is None or length < 0 else length,
        }


class Asked(Body):
    """Fields of both endpoints."""

    model: str
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self, call: Call) -> None:
        """Refuse what is known and not supported."""
        only("logprobs", self.logprobs, False)
        only("top_logprobs", self.top_logprobs, 0)
        only("keep_alive", self.keep_alive if self.keep_alive in (0, "0") else None)
        wanted = self.options.num_ctx if self.options is not None else None
        if wanted is not None and wanted > call.serving.context_length:
            message = f"is {wanted}, the context holds {call.serving.context_length}"
            raise FieldError("options.num_ctx", message)

    def answer(self) -> dict[str, Any] | None:
        """What the answer is held to."""
        if not self.format:
            return None
        return {"json_object": True} if self.format == "json" else {"json_schema": self.format}

    def thinking(self) -> dict[str, Any]:
        """`think` in the terms of `Conversation`."""
        if isinstance(self.think, str):
            return {"effort": self.think}
        return {"thinking": self.think}


class OllamaFunction(Open):
    """What an assistant called."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class OllamaCall(Open):
    """A call in an assistant's message."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Body):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def message(self, index: int) -> dict[str, Any]:
        """As chat templates take it."""
        only(f"messages[{index}].images", self.images, [])
        made: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            made["reasoning_content"] = made["thinking"] = self.thinking
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}",
                    "type": "function",
                    "function": {"name": f.name, "arguments": f.arguments},
                }
                for i, call in enumerate(self.tool_calls)
                for f in [call.function]
            ]
        made |= {} if self.tool_name is None else {"name": self.tool_name}
        made |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return made


class OllamaTool(Open):
    """A function on offer."""

    function: Function
    type: Literal["function"] = "function"


class ChatBody(Asked, kw_only=True):
    """The request of `/api/chat`."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: list[OllamaTool] | None = None


class GenerateBody(Asked, kw_only=True):
    """The request of `/api/generate`."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


async def chat(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = call.read(ChatBody)
    body.check(call)
    call.serving.model.check_name(body.model)
    writer = Writer(call, lambda event: {"message": {"role": "assistant", **_spelled(event)}})
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


def _spelled(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {"content": ""}
    if isinstance(event, TextDelta):
        thinks = event.channel is Channel.REASONING
        return {"content": "", "thinking": event.text} if thinks else {"content": event.text}
    function = {"name": event.name, "arguments": json.loads(event.arguments)}
    call = {"function": function}
    return {"content": "", "tool_calls": [call if event.id is None else {"id": event.id, **call}]}


def _generated(event: Event | None) -> dict[str, Any]:
    spelled = _spelled(event)
    thinking = {"thinking": spelled["thinking"]} if "thinking" in spelled else {}
    return {"response": spelled["content"], **thinking}


class Writer:
    """Spells outputs as objects of one piece each."""

    def __init__(self, call: Call, spell: Callable[[Event | None], dict[str, Any]]) -> None:
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
        async for output in replies.outputs():
            match output:
                case Delta():
                    for event in output.events:
                        yield line({**self._head(), **self._spell(event), "done": False})
                case Ended():
                    self._end = output
                case Totals():
                    yield line({**self._head(), **self._spell(None), **self._done(output)})

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer where it is not streamed: the same pieces, put together."""
        made = self._spell(None)
        end: dict[str, Any] = {}
        for output in outputs:
            match output:
                case Delta():
                    for event in output.events:
                        _join(made, self._spell(event))
                case Ended():
                    self._end = output
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
    files = list(model.directory.glob("*.safetensors"))
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


class ShowBody(Body):
    """The request of `/api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


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
