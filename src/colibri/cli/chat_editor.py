"""What people say to `coli chat`: an editor on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri.cli.chat_conversation import COMMANDS, SWITCHES, ReadLine
from colibri.cli.options import SAMPLING
from colibri.settings import Settings

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History


def line_reader(settings: Settings) -> ReadLine:
    """What reads the next message or command."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    editor: PromptSession[str] = PromptSession(
        key_bindings=bindings,
        history=_history(settings),
        completer=command_completer(),
        complete_while_typing=False,
    )
    return lambda: editor.prompt("> ")


def command_completer() -> Completer:
    """Completes commands, what `/set` takes, and names of files."""
    from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter
    from prompt_toolkit.document import Document

    def words(known: Iterable[str]) -> Completer:
        return WordCompleter(sorted(known), sentence=True)

    first = words(COMMANDS)
    files = PathCompleter(expanduser=True)
    values = {f"/set {name}": words(known) for name, known in SWITCHES.items()}
    rest: dict[str, Completer] = {"/save": files, "/load": files, "/set": words(_names()), **values}

    class Commands(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            text = document.text_before_cursor
            head, blank, last = text.rpartition(" ")
            completer = rest.get(head) if blank else first
            if completer is not None:
                yield from completer.get_completions(Document(last), complete_event)

    return Commands()


def _names() -> Iterable[str]:
    return {*SAMPLING, *SWITCHES}


def _history(settings: Settings) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = history_file(settings)
    return InMemoryHistory() if file is None else FileHistory(str(file))


def history_file(settings: Settings) -> Path | None:
    """Where lines are remembered, for their owner alone; None where nothing can be written."""
    try:
        settings.cache.mkdir(parents=True, exist_ok=True)
        file = settings.cache / "chat_history"
        file.touch(mode=0o600)
    except OSError:
        return None
    return file


def plain_line() -> str:
    """The next line of stdin.

    Raises:
        EOFError: there is none.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
