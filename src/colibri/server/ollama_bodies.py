"""What Ollama's API is asked, as it spells it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from colibri.server.bodies import Body, Open, only
from colibri.server.openai.messages import Function
from colibri.server.problems import FieldError
from colibri.server.serving import Call


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


class ShowBody(Body):
    """The request of `/api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
