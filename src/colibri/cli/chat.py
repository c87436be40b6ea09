"""`coli chat`: a conversation, whose state is kept between turns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.inspection import inspectable
from colibri.cli.interrupt import interruptible
from colibri.cli.options import with_sampling, with_settings
from colibri.cli.progress import Reporter
from colibri.cli.report import footer, say_notes
from colibri.cli.run import show
from colibri.errors import ColibriError, ContextLengthError
from colibri.settings import Settings

if TYPE_CHECKING:
    from colibri.engine.session import Session
    from colibri.llm import LLM

HELP = """\
/help            this list
/reset           begin a new conversation
/system [TEXT]   begin a new conversation with this system message; without TEXT, with none
/quit            leave (exit, quit and Ctrl-D do it too)
Ctrl-C stops an answer. On a terminal, Alt-Enter begins a new line."""

CONTINUATION = 100
"""Tokens of a reply of a model that has no chat template, where `--max-tokens` is not given."""

LEAVE = ("/quit", "/exit", "exit", "quit")

SYSTEM = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
ReadLine = Callable[[], str]


@with_settings
@with_sampling(f"the rest of the context, and {CONTINUATION} without a chat template")
def chat(system: SYSTEM = None, *, settings: Settings, sampling: dict[str, Any]) -> None:
    """Talk to a model."""
    with Reporter() as reporter:
        reporter.opening(settings)
        from colibri.llm import LLM

        llm = LLM.from_settings(settings, reporter)
        reporter.close()
        say(f"{llm.prepared.directory.resolve().name} · /help lists commands, Ctrl-D leaves")
        with llm, inspectable(llm), llm.open_session() as session:
            if not llm.has_chat_template:
                # It has no end of turn, and would go on to the end of the context.
                sampling = {"max_tokens": CONTINUATION, **given(sampling)}
                say(
                    "This model has no chat template: it is no assistant and continues what you "
                    f"write, {sampling['max_tokens']} tokens at a time."
                )
            Conversation(llm, session, reporter, sampling, system).run(line_reader())
        say_notes(llm)


@dataclass
class Conversation:
    """Messages so far, and what a line of input does to them."""

    llm: LLM
    session: Session
    reporter: Reporter
    sampling: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, not the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def run(self, read_line: ReadLine) -> None:
        """Read lines until there are no more."""
        while True:
            try:
                line = read_line()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line.strip() in LEAVE:
                return
            self.handle(line)

    def handle(self, line: str) -> None:
        """Obey a command, or answer; a request that cannot be served is told and forgotten."""
        word, _, rest = line.strip().partition(" ")
        if word == "/help":
            say(HELP)
        elif word == "/reset":
            self.reset()
            say("A new conversation begins.")
        elif word == "/system":
            self.system = rest.strip() or None
            self.reset()
            what = "without a system message" if self.system is None else "with this system message"
            say(f"A new conversation begins, {what}.")
        elif word.startswith("/"):
            say(f"There is no command {word}; /help lists them.")
        elif word:
            self.answer(line)

    def answer(self, line: str) -> None:
        """Answer one message."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": line})
        try:
            with interruptible() as cancelled:
                self.messages.append({"role": "assistant", "content": self.reply(cancelled)})
        except ContextLengthError as error:
            self.messages = before
            say(f"{error}; or begin a new conversation with /reset")
        except KeyboardInterrupt:  # pressed twice: the reply is dropped, not the conversation
            self.messages = before
            say("interrupted")
        except ColibriError as error:
            self.messages = before
            say(str(error))

    def reply(self, cancelled: Callable[[], bool]) -> str:
        """Print the answer as it comes, then its footer; return its text."""
        options: Any = {
            **self.sampling,
            "session": self.session,
            "progress": self.reporter.prompt,
            "cancelled": cancelled,
        }
        if self.llm.has_chat_template:
            stream = self.llm.stream_chat(self.messages, **options)
        else:
            text = "".join(message["content"] for message in self.messages)
            stream = self.llm.stream(text, **options)
        completion = show(stream, self.reporter)
        say(footer(completion, self.llm.metrics()))
        return completion.text or ""


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """The parameters that have a value."""
    return {name: value for name, value in sampling.items() if value is not None}


def line_reader() -> ReadLine:
    """An editor with history on a terminal, plain lines elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    editor: PromptSession[str] = PromptSession(key_bindings=bindings)
    return lambda: editor.prompt("> ")


def plain_line() -> str:
    """The next line of stdin.

    Raises:
        EOFError: there is none.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def say(text: str) -> None:
    """Tell people something; stdout is for answers alone.

    One write: another thread's line must not come between a text and its end.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
