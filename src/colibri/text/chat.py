"""A conversation to ids, so that no user's text can open a turn or end one.

What users, tools and documents wrote is data. Before rendering, every spelling of a control token
in it is broken by a mark: one character that occurs nowhere else. After rendering, the text is cut
at the template's own control tokens; a part that holds a mark is encoded as plain text without it.
Encoding cuts at control tokens anyway, so all other ids are those of the unmarked rendering.

Texts of the system, the developer and the assistant are trusted: they come from the application and
from the model, and reasoning markers in an assistant's message are meant as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colibri.errors import TextError
from colibri.text.spellings import MARKS, Part
from colibri.text.template import ChatTemplate, Message
from colibri.text.tokenizer import Tokenizer

_TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
_UNTRUSTED_VARIABLES = frozenset({"documents"})


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> list[int]:
    """Render a conversation and encode it.

    Where no untrusted text spells a control token the ids are those of
    `tokenizer.encode(template.render(…), special=True)`.

    Args:
        tokenizer: the checkpoint's tokenizer.
        template: the checkpoint's chat template.
        messages: the conversation, oldest first.
        tools: the functions on offer, as JSON schemas; untrusted.
        add_generation_prompt: whether to open the assistant's turn.
        continue_final_message: leave out what the template writes behind the last message's text,
            so that the model goes on with it.
        variables: further variables of the template; `documents` is untrusted.

    Raises:
        TextError: the template refuses the conversation.
        RequestError: a text is no valid Unicode.
    """
    guard = Guard(tokenizer, _unused_mark(template, messages, tools, variables))
    rendered = template.render(
        [guard.message(message) for message in messages],
        tools=None if tools is None else [guard.value(tool) for tool in tools],
        add_generation_prompt=add_generation_prompt,
        **{k: guard.value(v) if k in _UNTRUSTED_VARIABLES else v for k, v in variables.items()},
    )
    if continue_final_message:
        rendered = _up_to_text(rendered, messages[-1], f"the chat template of {template.where}")
    return guard.encode(rendered)


def _up_to_text(rendered: str, message: Message, where: str) -> str:
    """A rendering that ends with the text of its last message."""
    content = message.get("content")
    text = content.rstrip() if isinstance(content, str) else ""
    at = rendered.rfind(text.lstrip()) if text else -1
    if at < 0:
        raise TextError(f"{where} does not show the text of the last message: it cannot be gone on")
    return rendered[: at + len(text.lstrip())]


def _unused_mark(template: ChatTemplate, *inputs: object) -> str:
    seen = repr((template.sources, inputs))
    for mark in MARKS:
        if mark not in seen:
            return mark
    raise TextError("the conversation uses every letter that could mark its untrusted parts")


class Guard:
    """Marks untrusted text before a template is rendered and encodes the rendering."""

    def __init__(self, tokenizer: Tokenizer, mark: str) -> None:
        self._tokenizer = tokenizer
        self._spellings = tokenizer.spellings
        self._mark = mark

    def message(self, message: Message) -> dict[str, Any]:
        """Mark the texts of a message unless its role is trusted."""
        if message.get("role") in _TRUSTED_ROLES:
            return dict(message)
        # A role is a keyword to templates: it is touched only where it spells a control token.
        return {k: self._broken(v) if k == "role" else self.value(v) for k, v in message.items()}

    def value(self, value: Any) -> Any:
        """Mark every text in a JSON-like value."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._broken(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(inner) for inner in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Encode a rendering; the parts with a mark as plain text."""
        ids: list[int] = []
        trusted = ""
        for part in self._spellings.split(rendered) if self._mark in rendered else ():
            _, text, after = part
            if self._mark in text:
                ids += self._encode_trusted(trusted, at_start=not ids)
                ids += self._tokenizer.encode(self._plain(part), at_start=not ids)
                text = trusted = ""
            trusted += text + (after.text if after else "")
        rest = trusted if self._mark in rendered else rendered
        return ids + self._encode_trusted(rest, at_start=not ids)

    def _encode_trusted(self, text: str, *, at_start: bool) -> list[int]:
        return self._tokenizer.encode(text, special=True, at_start=at_start)

    def _plain(self, part: Part) -> str:
        """The text of a part without its marks and without the blanks its neighbours swallow."""
        before, text, after = part
        text = text.replace(self._mark, "")
        text = text.lstrip() if before and before.rstrip else text
        return text.rstrip() if after and after.lstrip else text

    def _broken(self, value: Any) -> Any:
        return self._spellings.broken(value, self._mark) if isinstance(value, str) else value

    def _marked(self, text: str) -> str:
        text = self._broken(text)
        # A template may join two texts, or put its own letters next to one: an end that could
        # become a spelling that way is marked too.
        if self._spellings.begins_at_end_of(text):
            text += self._mark
        if self._spellings.ends_at_start_of(text):
            text = self._mark + text
        # The normalizer may turn look-alikes into a spelling.
        if self._mark not in text and self._spellings.occur_in(self._tokenizer.normalize(text)):
            text = self._mark + text
        return text
