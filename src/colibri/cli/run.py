"""`coli run`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from colibri.cli.interrupt import interruptible
from colibri.cli.options import with_sampling, with_settings
from colibri.cli.progress import Reporter
from colibri.cli.report import as_json, footer, say_notes
from colibri.engine.request import FinishReason
from colibri.errors import Cancelled, RequestError
from colibri.llm import LLM, Completion, Stream
from colibri.settings import Settings

PROMPT = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="By default what stdin brings.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
IDS = Annotated[
    bool, typer.Option("--ids", help="The prompt is token ids, separated by blanks or commas.")
]
CHAT = Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")]

# Models may say anything, but they do not get to move cursors or rename windows.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@with_settings
@with_sampling
def run(
    prompt: PROMPT = None,
    *,
    as_object: JSON = False,
    ids: IDS = False,
    chat: CHAT = False,
    settings: Settings,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt."""
    text = read_prompt(prompt)
    with Reporter() as reporter:
        llm = LLM.from_settings(settings, reporter)
        with llm, interruptible() as cancelled:
            reporter.close()
            options = {**sampling, "progress": reporter.prompt, "cancelled": cancelled}
            stream = start(llm, text, ids=ids, chat=chat, options=options)
            completion = finish(stream) if as_object else show(stream, reporter)
            if as_object:
                print(json.dumps(as_json(completion, llm)), flush=True)
            else:
                print(footer(completion, llm.metrics()), file=sys.stderr)
        say_notes(llm)
    if completion.finish_reason is FinishReason.CANCELLED:
        raise typer.Exit(Cancelled.exit_code)


def read_prompt(prompt: str | None) -> str:
    """The argument, else all of stdin but its last line end, unless that is a terminal.

    Both are UTF-8 whatever the locale says.

    Raises:
        RequestError: there is neither, or it is no text.
    """
    if prompt is not None:
        return _decoded(os.fsencode(prompt), "the prompt")
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("there is no prompt: give one as argument, or through stdin")
    return _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is no text: {error}") from None


def start(llm: LLM, text: str, *, ids: bool, chat: bool, options: Any) -> Stream:
    """Begin the reply that the flags ask for."""
    if ids and chat:
        raise RequestError("--ids and --chat exclude each other")
    if chat:
        return llm.stream_chat([{"role": "user", "content": text}], **options)
    return llm.stream(parse_ids(text) if ids else text, **options)


def parse_ids(text: str) -> list[int]:
    """Token ids from text.

    Raises:
        RequestError: a word is no number.
    """
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise RequestError(f"--ids: {error}: write token ids, separated by blanks") from None


def finish(stream: Stream) -> Completion:
    """Wait for the whole reply."""
    with stream:
        for _ in stream:
            pass
    return stream.completion


def show(stream: Stream, reporter: Reporter) -> Completion:
    """Print the reply as it comes: text, or ids where there is no tokenizer."""
    forbidden = CONTROLS if sys.stdout.isatty() else {}
    with stream:
        for chunk in stream:
            reporter.close()
            shown = chunk.text
            if shown is None:
                shown = "".join(f"{token} " for token in chunk.token_ids)
            if shown:
                print(shown.translate(forbidden), end="", flush=True)
    print(flush=True)
    return stream.completion
