"""`coli run`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.inspection import inspectable
from colibri.cli.interrupt import interruptible
from colibri.cli.options import JSON, with_sampling, with_settings
from colibri.cli.progress import Reporter
from colibri.cli.report import as_json, footer, say_notes
from colibri.engine.request import FinishReason
from colibri.errors import Cancelled, RequestError, TextError
from colibri.settings import Settings

if TYPE_CHECKING:
    from colibri.llm import LLM, Completion, Stream

MAX_TOKENS = 256
"""Tokens of a reply where `--max-tokens` is not given; fewer where the context ends before."""

PROMPT = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="By default what stdin brings.")
]
IDS = Annotated[
    bool,
    typer.Option(
        "--ids", metavar="", help="The prompt is token ids, separated by blanks or commas."
    ),
]
CHAT = Annotated[
    bool,
    typer.Option("--chat", metavar="", help="Ask through the checkpoint's chat template."),
]

# Models may say anything, but they do not get to move cursors or rename windows.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@with_settings
@with_sampling(f"{MAX_TOKENS}, or what is left of the context")
def run(
    context: typer.Context,
    prompt: PROMPT = None,
    *,
    as_object: JSON = False,
    ids: IDS = False,
    chat: CHAT = False,
    settings: Settings,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt."""
    settings = replace(settings, max_sessions=None)  # one reply is computed
    text = read_prompt(prompt, context.args, ids=ids)
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.llm import LLM

        llm = LLM.from_settings(settings, reporter)
        with llm, inspectable(llm), interruptible() as cancelled:
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


def read_prompt(prompt: str | None, extra: Sequence[str] = (), *, ids: bool = False) -> str:
    """The argument, else all of stdin but its last line end, unless that is a terminal.

    Both are UTF-8 whatever the locale says.

    Raises:
        RequestError: there is neither, there are several, it is no text, or a model's directory.
    """
    if prompt is not None and not ids and is_model(prompt):
        rest = " ".join(extra) or "PROMPT"
        raise RequestError(
            f"'{prompt}' is a directory with a model: write `coli run --model {prompt} \"{rest}\"`"
        )
    if extra:
        raise RequestError(
            f"there are {1 + len(extra)} prompts, '{prompt}' and '{extra[0]}'"
            f"{' and more' if len(extra) > 1 else ''}: put the prompt in quotes"
        )
    if prompt is not None:
        return _decoded(os.fsencode(prompt), "the prompt")
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("there is no prompt: give one as argument, or through stdin")
    return _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def is_model(prompt: str) -> bool:
    """Whether a prompt is the path of a checkpoint: a model named where a prompt belongs."""
    try:
        return (Path(prompt) / "config.json").is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is no text: {error}") from None


def start(llm: LLM, text: str, *, ids: bool, chat: bool, options: Any) -> Stream:
    """Begin the reply that the flags ask for."""
    if ids and chat:
        raise RequestError("--ids and --chat exclude each other")
    if not ids:
        require_tokenizer(llm, "give token ids with --ids")
    if chat:
        prompt = llm.encode_chat([{"role": "user", "content": text}])
    else:
        prompt = list(llm.encode(parse_ids(text) if ids else text))
    if options.get("max_tokens") is None:
        room = llm.plan().context_length - len(prompt)
        options = {**options, "max_tokens": max(1, min(MAX_TOKENS, room))}
    return llm.stream(prompt, **options)


def require_tokenizer(llm: LLM, advice: str) -> None:
    """Refuse text to a model that has no tokenizer.

    Raises:
        TextError: it has none; the message ends with `advice`.
    """
    if llm.prepared.tokenizer is None:
        raise TextError(f"{llm.prepared.directory}: has no tokenizer (tokenizer.json): {advice}")


def parse_ids(text: str) -> list[int]:
    """Token ids from text.

    Raises:
        RequestError: a word is no number.
    """
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdecimal():
            raise RequestError(
                f"--ids: {word!r} is no token id: write token ids, which are whole numbers, "
                "separated by blanks or commas"
            )
    return [int(word) for word in words]


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
