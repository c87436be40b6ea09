"""What clients say, as ids: conversations and raw text, and how replies to them are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from colibri.errors import TextError
from colibri.server.problems import FieldError, Problem
from colibri.server.served_model import ServedModel
from colibri.text import encode_chat
from colibri.text.dialects import Dialect
from colibri.text.dialects.demanded import any_answer, call_grammar, reasoning_prefix
from colibri.text.dialects.dialect import Tools
from colibri.text.tokenizer import Tokenizer

ToolChoice: TypeAlias = Literal["auto", "none", "required"]
_TAIL = 32  # ids whose text shows what the end of a prompt has opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as every chat endpoint puts it.

    Attributes:
        messages: as chat templates take them; the last one, where it is the assistant's, is gone
            on with.
        tools: functions on offer, each `{"type": "function", "function": {…}}`.
        tool_choice: whether the reply may, must not or must call functions.
        tool_name: the only function that may be called.
        parallel: whether a reply that must call may call more than once.
        thinking: whether to reason; None leaves it to the template.
        effort: how much to reason, in the template's own words.
        usual_effort: the API's own default: no demand where the template knows no degrees.
        budget: tokens of reasoning at most.
        variables: further variables of the template.
        answer: what the answer is held to, see `colibri.text.constraint`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel: bool = True
    thinking: bool | None = None
    effort: str | None = None
    usual_effort: str | None = None
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    answer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Ids, and how replies to them are read.

    Attributes:
        ids: of the prompt.
        tail: how the prompt ends, as text.
        dialect: the replies' syntax; None for plain text.
        tools: argument schemas by function; None where calls are not looked for.
        constraint: what replies are held to.
        stop_ids: ids that end a turn beside the model's own.
        marks: positions where other conversations may turn off.
    """

    ids: tuple[int, ...]
    tail: str = ""
    dialect: Dialect | None = None
    tools: Tools | None = None
    constraint: dict[str, Any] | None = None
    stop_ids: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()


def raw_prompt(model: ServedModel, prompt: str | Sequence[int]) -> Prompt:
    """A text, or ids, to be continued as they are."""
    if not isinstance(prompt, str):
        if not prompt:
            raise FieldError("prompt", "is empty: give at least one token")
        return Prompt(ids=tuple(prompt))
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode_prompt(prompt)
    if not ids:
        bos = tokenizer.special_tokens.get("bos_token")
        start = None if bos is None else tokenizer.id_of(bos)
        if start is None:
            raise FieldError("prompt", "is empty: give at least one token")
        ids = [start]
    return Prompt(ids=tuple(ids))


def chat_prompt(model: ServedModel, conversation: Conversation) -> Prompt:
    """A conversation, the assistant's turn opened or gone on with.

    Raises:
        FieldError: it asks for what this model's template or dialect cannot give.
        TextError: the template refuses the conversation.
    """
    conversation = _checked(model, conversation)
    tokenizer = _tokenizer(model)
    tools = None if conversation.tool_choice == "none" else _schemas(conversation)
    ids = _encoded(model, tokenizer, conversation)
    tail = tokenizer.decode(ids[-_TAIL:], skip_special=False)
    return Prompt(
        ids=tuple(ids),
        tail=tail,
        dialect=model.dialect,
        tools=tools or None,
        constraint=_constraint(model, tokenizer, conversation, tools or {}, tail),
        stop_ids=model.turn_ids,
        marks=_marks(model, tokenizer, conversation, ids),
    )


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        message = f"{model.name} has no tokenizer: give token ids"
        raise Problem(400, message, "prompt", "no_tokenizer")
    return model.tokenizer


def _checked(model: ServedModel, conversation: Conversation) -> Conversation:
    if model.template is None:
        message = f"{model.name} has no chat template: it only continues text (/v1/completions)"
        raise Problem(400, message, "messages", "no_chat_template")
    if not conversation.messages:
        raise FieldError("messages", "is empty: give at least one message")
    names = [tool["function"]["name"] for tool in conversation.tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "holds two functions of the same name")
    if conversation.tool_name is not None and conversation.tool_name not in names:
        raise FieldError("tool_choice", f"names {conversation.tool_name!r}, which is no tool here")
    if conversation.tool_choice == "required" and not names:
        raise FieldError("tool_choice", "demands a call, but there are no tools")
    if names and not model.offers_tools:
        raise FieldError("tools", f"the chat template of {model.name} shows the model no tools")
    if conversation.tool_choice == "required" and conversation.answer is not None:
        raise FieldError("tool_choice", "demands a call, and the answer's format forbids one")
    return replace(conversation, messages=model.prepared_messages(conversation.messages))


def _schemas(conversation: Conversation) -> dict[str, Mapping[str, Any]]:
    """Argument schemas by name, in order."""
    functions = [tool["function"] for tool in conversation.tools]
    return {f["name"]: f.get("parameters") or {} for f in functions}


def _encoded(model: ServedModel, tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The ids; templates that want arguments as text get them as text."""
    assert model.template is not None
    messages = conversation.messages
    prefill = messages[-1].get("role") == "assistant"
    if prefill and messages[-1].get("tool_calls"):
        raise FieldError("messages", "ends with tool calls: give their results")
    variables = _switches(model, conversation)
    options: dict[str, Any] = {
        "tools": conversation.tools or None,
        "add_generation_prompt": not prefill,
        "continue_final_message": prefill,
        **variables,
        **conversation.variables,
    }
    if conversation.tool_choice == "none":
        options["tools"] = None
    try:
        return encode_chat(tokenizer, model.template, messages, **options)
    except TextError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        spelled = model.with_spelled_arguments(messages)
        return encode_chat(tokenizer, model.template, spelled, **options)


def _switches(model: ServedModel, conversation: Conversation) -> dict[str, Any]:
    """Variables of the template that switch reasoning."""
    effort = conversation.effort
    if effort == conversation.usual_effort and not model.has_degrees:
        effort = None
    return model.variables(conversation.thinking, effort)


def _constraint(
    model: ServedModel,
    tokenizer: Tokenizer,
    conversation: Conversation,
    tools: Tools,
    tail: str,
) -> dict[str, Any] | None:
    may_reason = model.reasons and conversation.thinking is not False
    if conversation.tool_choice == "required":
        name = conversation.tool_name
        wanted = tools if name is None else {name: tools[name]}
        grammar = call_grammar(
            model.dialect,
            tokenizer,
            wanted,
            prompt=tail,
            parallel=conversation.parallel,
            budget=conversation.budget,
            may_reason=may_reason,
        )
        return {"grammar": grammar}
    answer = conversation.answer
    if answer is None and conversation.budget is None:
        return None
    prefix = reasoning_prefix(
        model.dialect, tokenizer, tail, conversation.budget, may_reason=may_reason
    )
    if answer is None:
        answer = {"grammar": any_answer(model.dialect, tokenizer)}
    return {**answer, **({} if prefix is None else {"prefix": prefix})}


def _marks(
    model: ServedModel, tokenizer: Tokenizer, conversation: Conversation, ids: Sequence[int]
) -> tuple[int, ...]:
    """Where the part that other conversations may share ends: behind system and tools."""
    assert model.template is not None
    head = [m for m in conversation.messages[:1] if m.get("role") in ("system", "developer")]
    if not head and not conversation.tools:
        return ()
    user = {"role": "user", "content": "\u2205"}  # a letter that few begin with
    try:
        shared = _encoded(model, tokenizer, replace(conversation, messages=[*head, user]))
    except TextError:
        return ()
    same = next((i for i, (a, b) in enumerate(zip(ids, shared, strict=False)) if a != b), 0)
    return (same,) if 0 < same < len(ids) else ()
