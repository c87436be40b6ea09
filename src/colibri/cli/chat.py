"""`coli chat`: a conversation with a model in this process, or with a server."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from colibri.cli.chat_conversation import Conversation
from colibri.cli.chat_editor import line_reader
from colibri.cli.chat_partners import LocalPartner, Partner
from colibri.cli.inspection import inspectable
from colibri.cli.options import with_sampling, with_settings
from colibri.cli.progress import Reporter
from colibri.cli.report import say, say_notes
from colibri.cli.run import require_tokenizer
from colibri.settings import Settings

CONTINUATION = 100
"""Tokens of a reply of a model that has no chat template, where `--max-tokens` is not given."""

SYSTEM = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
ATTACH = Annotated[
    str | None,
    typer.Option("--attach", metavar="URL", help="Talk to a server instead of loading a model."),
]


@with_settings
@with_sampling(f"the rest of the context, and {CONTINUATION} without a chat template")
def chat(
    system: SYSTEM = None,
    attach: ATTACH = None,
    *,
    settings: Settings,
    sampling: dict[str, Any],
) -> None:
    """Talk to a model."""
    with Reporter() as reporter:
        if attach is None:
            talk(system, settings, sampling, reporter)
        else:
            from colibri.cli.chat_attached import AttachedPartner

            partner = AttachedPartner(attach, reporter, settings.api_key)
            greet(f"{partner.name} at {attach}")
            end(converse(partner, reporter, sampling, system, settings))


def talk(
    system: str | None, settings: Settings, sampling: dict[str, Any], reporter: Reporter
) -> None:
    """Load the model and talk to it."""
    settings = replace(settings, max_sessions=None)  # one reply is computed at a time
    reporter.opening(settings)
    from colibri.llm import LLM

    llm = LLM.from_settings(settings, reporter)
    reporter.close()
    with llm, inspectable(llm), llm.open_session() as session:
        require_tokenizer(llm, "put it there, or use `coli run --ids`, which takes token ids")
        partner = LocalPartner(llm, session, reporter)
        greet(partner.name)
        if settings.session_dir is not None:
            say(f"What is computed of conversations is kept in {settings.session_dir}.")
        conversation = converse(partner, reporter, sampling, system, settings)
    say_notes(llm)
    end(conversation)


def converse(
    partner: Partner,
    reporter: Reporter,
    sampling: dict[str, Any],
    system: str | None,
    settings: Settings,
) -> Conversation:
    """Read and answer until there is nothing more to read."""
    if partner.continues:
        # It has no end of turn, and would go on to the end of the context.
        sampling = {"max_tokens": CONTINUATION, **given(sampling)}
        say(
            "This model has no chat template: it is no assistant and continues what you "
            f"write, {sampling['max_tokens']} tokens at a time."
        )
    conversation = Conversation(partner, reporter, sampling, system)
    conversation.run(line_reader(settings))
    return conversation


def end(conversation: Conversation) -> None:
    """Fail where a script's messages all failed; people on a terminal have seen it."""
    failure = conversation.failure
    if failure is not None and not conversation.num_answers and not sys.stdin.isatty():
        raise typer.Exit(failure.exit_code)


def greet(name: str) -> None:
    """Say who is there."""
    say(f"{name} · /help lists commands, Ctrl-D leaves")


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """The parameters that have a value."""
    return {name: value for name, value in sampling.items() if value is not None}
