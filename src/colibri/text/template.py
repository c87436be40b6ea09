"""The checkpoint's own chat template: jinja in a sandbox, with what Hugging Face offers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from colibri.checkpoint.gguf import gguf_of, read_gguf
from colibri.errors import TextError
from colibri.text.files import SideFiles, read_json
from colibri.text.gguf_vocabulary import chat_templates, side_files

Message = Mapping[str, Any]
"""One message of a chat: `role`, `content`, and what else the template reads."""


class ChatTemplate:
    """Renders conversations.

    A checkpoint may name several templates: `tool_use` serves requests with tools, `default` all
    others.

    Attributes:
        sources: the templates' jinja text by name.
        where: the file, for messages.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the templates.

        Args:
            sources: jinja text by name; a lone template is called `default`.
            special_tokens: variables such as `bos_token`.
            where: the file, for messages.
            now: the clock behind `strftime_now`.

        Raises:
            TextError: a template is no valid jinja.
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens or {})
        self.where = where
        environment = _environment(now)
        self._templates = {
            name: _compile(environment, source, f"{where} ({name})")
            for name, source in sources.items()
        }

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Read chat_template.jinja, else chat_template.json, else tokenizer_config.json.

        `directory` may also be a GGUF file, or hold one.

        Returns:
            The template, or None where the checkpoint has none.

        Raises:
            TextError: a file is broken, or the template is no valid jinja.
        """
        if (file := gguf_of(directory)) is not None:
            source = read_gguf(file)
            found = chat_templates(source)
            return (
                cls(found, side_files(source).special_tokens(), where=str(file)) if found else None
            )
        side = SideFiles.read(directory)
        for path, sources in (
            (directory / "chat_template.jinja", _read_plain(directory)),
            (directory / "chat_template.json", _read_key(directory / "chat_template.json")),
            (directory / "tokenizer_config.json", _read_key(directory / "tokenizer_config.json")),
        ):
            if sources:
                return cls(sources, side.special_tokens(), where=str(path))
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation to the text the model is prompted with.

        Args:
            messages: the conversation, oldest first.
            tools: the functions on offer, as JSON schemas.
            add_generation_prompt: whether to open the assistant's turn.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            TextError: the template refuses the conversation, with its own words, or fails.
        """
        values = {"documents": None, **self._special_tokens, **variables}
        try:
            return self._choose(tools).render(
                values,
                messages=deepcopy([dict(message) for message in messages]),
                tools=None if tools is None else deepcopy([dict(tool) for tool in tools]),
                add_generation_prompt=add_generation_prompt,
            )
        except _RefusedError as error:
            raise TextError(f"{self.where} refuses the conversation: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise TextError(f"{self.where} fails on the conversation: {reason}") from error

    def _choose(self, tools: object) -> Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TextError(f"{self.where} has no template 'default', only {list(self.sources)}")
        return self._templates[name]


def _read_plain(directory: Path) -> dict[str, str]:
    files = {"default": directory / "chat_template.jinja"}
    if not files["default"].is_file():
        return {}
    more = directory / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{directory}: a chat template cannot be read ({error})") from error


def _read_key(path: Path) -> dict[str, str]:
    value = read_json(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = value if isinstance(value, dict) else {v["name"]: v["template"] for v in value}
    except (TypeError, KeyError) as error:
        raise TextError(f"{path}: chat_template must be a text or a list of named ones") from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TextError(f"{path}: names and texts under chat_template must be strings")
    return named


def _compile(environment: SandboxedEnvironment, source: str, where: str) -> Template:
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise TextError(f"{where} is no valid jinja (line {line}): {error}") from error


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the trainable parts of a rendering."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration is no ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the body as it is; assignments stay inside, as for transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> SandboxedEnvironment:
    """Templates may append to lists, as some do: what they are given is a copy."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models saw it in training: without jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _RefusedError(TemplateError):
    """What a template says through `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)
