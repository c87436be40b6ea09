"""`/completion`, `/tokenize` and `/detokenize`: the engine's own terms, plainly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.bodies import Body, Sampling, stop_strings
from colibri.server.openai.completions import constrained, text_of
from colibri.server.openai.envelope import failure, usage
from colibri.server.openai.messages import Message, Tool, answer_of, message_of, tool_of
from colibri.server.problems import FieldError, Problem
from colibri.server.prompts import Conversation, chat_prompt, raw_prompt
from colibri.server.replies import Delta, Ended, Output, Prompted, Replies, Totals
from colibri.server.serving import Call, totals_of
from colibri.server.streams import SSE_ALIVE, SSE_TYPE, Stream, progress, sse
from colibri.text import Tokenizer


class CompletionBody(Sampling, kw_only=True):
    """The request of `/completion`."""

    prompt: str | list[int]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_ids: list[int] | None = None
    stream: bool | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def answer(self) -> dict[str, Any] | None:
        """What the answer is held to."""
        if self.json_schema is None:
            return answer_of(None, self.regex, self.grammar)
        if self.regex is not None or self.grammar is not None:
            raise FieldError("json_schema", "and another format exclude each other")
        return {"json_schema": self.json_schema}


async def completion(call: Call) -> ASGIApp:
    """Continue a prompt of text or ids."""
    body = call.read(CompletionBody)
    replies = await call.begin(
        constrained(raw_prompt(call.serving.model, body.prompt), body.answer()),
        {**body.sampling(), "max_tokens": body.max_tokens, "stop_ids": body.stop_ids},
        stop=stop_strings(body.stop, None, "stop"),
    )
    if body.stream:
        return Stream(
            _events(replies),
            media_type=SSE_TYPE,
            failure=failure,
            alive=SSE_ALIVE,
            quiet_s=call.serving.limits.quiet_s,
        )
    has_text = call.serving.model.tokenizer is not None
    return JSONResponse(_whole(await call.all_of(replies), has_text))


def _whole(outputs: list[Output], has_text: bool) -> dict[str, Any]:
    deltas = [output for output in outputs if isinstance(output, Delta)]
    end = next(output for output in outputs if isinstance(output, Ended))
    return {
        "text": "".join(text_of(delta) for delta in deltas) if has_text else None,
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        **_end(end),
        "usage": usage(totals_of(outputs)),
    }


async def _events(replies: Replies) -> AsyncIterator[bytes]:
    end: dict[str, Any] = {}
    async for output in replies.outputs():
        match output:
            case Delta():
                yield sse({"text": text_of(output), "token_ids": output.token_ids})
            case Prompted():
                yield progress(output.done, output.total)
            case Ended():
                end = _end(output)
            case Totals():
                yield sse({"text": "", "token_ids": [], **end, "usage": usage(output)})


def _end(end: Ended) -> dict[str, Any]:
    return {"finish_reason": end.reason, "stop": end.stop}


class TokenizeBody(Body):
    """The request of `/tokenize`: `prompt` (or `content`), or `messages`."""

    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None


async def tokenize(call: Call) -> ASGIApp:
    """Turn text, or a conversation, into ids."""
    body = call.read(TokenizeBody)
    call.serving.model.check_name(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise FieldError("prompt", "is needed, or content, or messages: one of them")
    ids = _ids(call, body)
    most = call.serving.context_length
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})


def _ids(call: Call, body: TokenizeBody) -> list[int]:
    model = call.serving.model
    if body.messages is not None:
        messages = [message_of(message, i) for i, message in enumerate(body.messages)]
        tools = body.tools or []
        conversation = Conversation(
            messages=messages,
            tools=[tool_of(t.function, f"tools[{i}].function") for i, t in enumerate(tools)],
        )
        return list(chat_prompt(model, conversation).ids)
    text = body.prompt if body.prompt is not None else body.content or ""
    plain = body.add_special_tokens is False or body.add_special is False
    tokenizer = _tokenizer(call)
    return tokenizer.encode(text, special=True) if plain else tokenizer.encode_prompt(text)


class DetokenizeBody(Body):
    """The request of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


async def detokenize(call: Call) -> ASGIApp:
    """Turn ids into text, control tokens spelled out."""
    body = call.read(DetokenizeBody)
    call.serving.model.check_name(body.model)
    text = _tokenizer(call).decode(body.tokens, skip_special=False)
    return JSONResponse({"prompt": text, "content": text})


def _tokenizer(call: Call) -> Tokenizer:
    tokenizer = call.serving.model.tokenizer
    if tokenizer is None:
        raise Problem(400, "this model has no tokenizer", None, "no_tokenizer")
    return tokenizer
