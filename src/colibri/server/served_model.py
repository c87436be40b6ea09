"""The model as the server knows it: its text side; weights are in the engine's process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from colibri.checkpoint.config import read_config
from colibri.checkpoint.gguf import gguf_of, parts_of, read_gguf
from colibri.checkpoint.hub.names import title
from colibri.errors import RequestError, TextError
from colibri.llm.defaults import GenerationDefaults
from colibri.server.problems import FieldError, Problem
from colibri.text import ChatTemplate, Tokenizer, encode_chat
from colibri.text.dialects import Dialect, find_dialect, object_of

_THINKING = ("enable_thinking", "thinking", "thinking_mode", "reasoning")
_EFFORT = ("reasoning_effort", "thinking_effort", "reasoning_strength")


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint's tokenizer, template, dialect and defaults.

    Attributes:
        directory: of the checkpoint.
        names: what it may be called in requests; the first is what the server calls it.
        tokenizer: None where the checkpoint has none.
        template: None where it has none.
        dialect: the syntax of its replies.
        defaults: of its generation_config.json.
        created: when its files were written, in seconds since 1970.
        digest: SHA-256 of its config.json, or of how its GGUF file begins.
        model_type: as its config.json says, empty where it says none; a GGUF file's architecture.
    """

    directory: Path
    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    dialect: Dialect
    defaults: GenerationDefaults
    created: int = 0
    digest: str = ""
    model_type: str = ""

    @classmethod
    def load(
        cls, directory: Path, names: Sequence[str] = (), dialect: str | None = None
    ) -> ServedModel:
        """Read what a checkpoint says about text.

        Args:
            directory: of the checkpoint.
            names: further names; the first of them becomes the model's own.
            dialect: what its family speaks, where the template does not show it.

        Raises:
            TextError, CheckpointError: a file is broken; the message names it.
        """
        file = gguf_of(directory)
        about = directory / "config.json" if file is None else file
        if file is None:
            model_type = str(read_config(about).get("model_type", ""))
        else:
            model_type = read_gguf(file).architecture
        tokenizer = Tokenizer.load(directory)
        template = None if tokenizer is None else ChatTemplate.load(directory)
        sources = () if template is None else template.sources.values()
        return cls(
            directory=directory,
            names=(*names, title(directory)),
            tokenizer=tokenizer,
            template=template,
            dialect=find_dialect(sources, dialect),
            defaults=GenerationDefaults.load(directory),
            created=int(about.stat().st_mtime),
            digest=_digest(about),
            model_type=model_type,
        )

    @property
    def files(self) -> list[Path]:
        """Its weights."""
        file = gguf_of(self.directory)
        return sorted(self.directory.glob("*.safetensors")) if file is None else parts_of(file)

    @property
    def name(self) -> str:
        """What the server calls it."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            Problem: it names one that is not served.
        """
        if name is None or name in self.names or name.removesuffix(":latest") in self.names:
            return
        known = " or ".join(self.names)
        message = f"model {name!r} is not served here: ask for {known} (`--served-name` adds names)"
        raise Problem(404, message, "model", "model_not_found")

    @cached_property
    def _source(self) -> str:
        return "" if self.template is None else "\n".join(self.template.sources.values())

    @property
    def offers_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self._source

    @property
    def calls_as(self) -> str | None:
        """The name of the syntax of tool calls; None where the template offers no tools."""
        return self.dialect.name if self.offers_tools else None

    @property
    def has_degrees(self) -> bool:
        """Whether the template knows degrees of reasoning."""
        return any(name in self._source for name in _EFFORT)

    def variables(self, thinking: bool | None, effort: str | None) -> dict[str, Any]:
        """Variables of the template that switch reasoning.

        Raises:
            FieldError: the template has no such switch.
        """
        found: dict[str, Any] = {}
        if thinking is not None:
            found |= self._thinking(thinking)
        if effort is not None:
            if not self.has_degrees:
                raise FieldError("reasoning_effort", f"{self.name} has no degrees of reasoning")
            found |= {name: effort for name in _EFFORT if name in self._source}
        return found

    def _thinking(self, thinking: bool) -> dict[str, Any]:
        switches = [name for name in _THINKING if name in self._source]
        if not switches and thinking != self.reasons:
            state = "always" if self.reasons else "never"
            raise FieldError("thinking", f"{self.name} {state} reasons: it cannot be switched")
        words = {"thinking_mode": "enabled" if thinking else "disabled"}
        return {name: words.get(name, thinking) for name in switches}

    @property
    def reasons(self) -> bool:
        """Whether the template shows reasoning."""
        header = self.dialect.header
        marks = [opening for opening, _ in self.dialect.reasoning]
        marks += [] if header is None or header.reasoning is None else [header.reasoning]
        return any(mark in self._source for mark in marks)

    def prepared_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates take them: known roles, arguments as objects, results in order.

        Raises:
            FieldError: arguments of a call are no object, or a result answers no call.
        """
        prepared = [self._prepared(message, i) for i, message in enumerate(messages)]
        return _in_order_of_calls(prepared)

    def _prepared(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        role = message["role"]
        if role == "developer" and "developer" not in self._source:
            role = "system"
        made = {**message, "role": role}
        calls = message.get("tool_calls")
        if calls:
            place = f"messages[{index}].tool_calls"
            made["tool_calls"] = [
                _with_object(call, f"{place}[{i}].function.arguments")
                for i, call in enumerate(calls)
            ]
        return made

    @staticmethod
    def with_spelled_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same messages with arguments of calls as text."""
        return [
            {
                **message,
                **(
                    {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}
                    if message.get("tool_calls")
                    else {}
                ),
            }
            for message in messages
        ]

    @cached_property
    def turn_ids(self) -> tuple[int, ...]:
        """Control tokens that stand between an answer and the next question."""
        if self.template is None or self.tokenizer is None:
            return ()
        texts = [("user", "\u2460"), ("assistant", "\u2461"), ("user", "\u2462")]
        messages = [{"role": role, "content": text} for role, text in texts]
        try:
            ids = encode_chat(self.tokenizer, self.template, messages, add_generation_prompt=False)
        except (TextError, RequestError):
            return ()
        between = self.tokenizer.decode(ids, skip_special=False)
        between = between.partition("\u2461")[2].partition("\u2462")[0]
        markers = "\n".join(self.dialect.markers)
        return tuple(
            token.id
            for token in self.tokenizer.control_tokens
            if token.text in between and token.text not in markers
        )


def _with_object(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            if not arguments.lstrip().startswith("{"):
                raise FieldError(place, f"is no JSON: {error}") from None
            arguments = object_of(arguments)  # a call that a reply broke off comes back
    if not isinstance(arguments, dict):
        raise FieldError(place, "is no JSON object")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    spelled = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": spelled}}


def _in_order_of_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates that show no ids tell results apart by their order: that of the calls."""
    ordered: list[dict[str, Any]] = []
    calls: dict[str, tuple[int, str]] = {}
    results: list[dict[str, Any]] = []

    def close() -> None:
        ordered.extend(
            sorted(results, key=lambda m: calls.get(str(m.get("tool_call_id")), (0, ""))[0])
        )
        results.clear()

    for index, message in enumerate(messages):
        if message["role"] != "tool":
            close()
            ordered.append(message)
            if message.get("tool_calls"):
                named = [(c.get("id"), c["function"]["name"]) for c in message["tool_calls"]]
                calls = {id: (i, name) for i, (id, name) in enumerate(named) if id is not None}
            continue
        id = message.get("tool_call_id")
        if id is not None and id not in calls:
            raise FieldError(f"messages[{index}].tool_call_id", f"{id!r} is the id of no call")
        name = {} if id is None else {"name": calls[id][1]}
        results.append({**name, **message})
    close()
    return ordered


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of the first megabyte of a larger one."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(1 << 20)).hexdigest()
