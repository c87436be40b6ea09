"""A conversation in the terminal: its messages, and what a line of input does to them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri.cli.chat_files import read_conversation, write_conversation
from colibri.cli.chat_partners import Partner
from colibri.cli.chat_screen import open_screen
from colibri.cli.interrupt import interruptible
from colibri.cli.progress import Reporter
from colibri.cli.report import say
from colibri.errors import ColibriError, ContextLengthError, RequestError

if TYPE_CHECKING:
    from colibri.text.dialects import Event

HELP = """\
/help              this list
/reset             begin a new conversation
/system [TEXT]     begin a new conversation with this system message; without TEXT, with none
/retry             answer the last message again
/save FILE         write the conversation down
/load FILE         go on with one that was written down
/set [NAME VALUE]  set a sampling parameter, `reasoning` (show or hide) or `markdown` (on or off);
                   without, show them
/tokens            how much of the context the conversation takes
/stats             what has happened so far
/quit              leave (exit, quit and Ctrl-D do it too)
Ctrl-C stops an answer. On a terminal, Alt-Enter begins a new line."""

LEAVE = ("/quit", "/exit", "exit", "quit")
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))
SWITCHES = {"reasoning": ("show", "hide"), "markdown": ("on", "off")}
"""What `/set` takes beside sampling parameters; the first value is what it is at the beginning."""

_COMMAND = re.compile(r"/[a-z]+")  # a path is none
ReadLine = Callable[[], str]


@dataclass
class Conversation:
    """Messages so far, and how they grow.

    Attributes:
        num_answers: how many messages were answered.
        failure: why the last one that was not answered was not.
    """

    partner: Partner
    reporter: Reporter
    sampling: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    switches: dict[str, str] = field(
        default_factory=lambda: {name: values[0] for name, values in SWITCHES.items()}
    )
    num_answers: int = 0
    failure: ColibriError | None = None

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
        """Obey a command, or answer; what cannot be done is told and forgotten."""
        word, _, rest = line.strip().partition(" ")
        if _COMMAND.fullmatch(word) is None:
            if word:
                self.answer(line)
            return
        command = self.commands().get(word)
        if command is None:
            say(f"There is no command {word}; /help lists them.")
            return
        try:
            command(rest.strip())
        except ColibriError as error:
            say(str(error))

    def commands(self) -> dict[str, Callable[[str], None]]:
        """What each command does with the rest of its line."""
        return {
            "/help": lambda _: say(HELP),
            "/reset": self._begin_anew,
            "/system": self._set_system,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/set": self._set,
            "/tokens": lambda _: say(self.partner.count(self.messages)),
            "/stats": lambda _: say(self.partner.stats()),
        }

    def _begin_anew(self, _: str) -> None:
        self.reset()
        say("A new conversation begins.")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self.reset()
        what = "without a system message" if self.system is None else "with this system message"
        say(f"A new conversation begins, {what}.")

    def _retry(self, _: str) -> None:
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise RequestError("there is nothing to answer again")
        line = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        self.answer(line)

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file")
        path = write_conversation(name, self.messages)
        say(f"{_counted(self.messages)} in {path}.")

    def _load(self, name: str) -> None:
        if not name:
            raise RequestError("/load needs the name of a file")
        self.messages = read_conversation(name)
        first = self.messages[0] if self.messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        say(f"The conversation goes on: {_counted(self.messages)}.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip()
        if not name:
            shown = self.switches | self.sampling
            say(", ".join(f"{k} {v}" for k, v in shown.items() if v is not None))
        elif name in SWITCHES:
            if value not in SWITCHES[name]:
                raise RequestError(f"{name} is {value!r}: it must be {' or '.join(SWITCHES[name])}")
            self.switches[name] = value
        else:
            self.sampling = with_parameter(self.sampling, name, value)

    def answer(self, line: str) -> None:
        """Answer one message."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": line})
        try:
            with interruptible() as cancelled:
                events = self.partner.answer(self.messages, self.sampling, cancelled)
                self.messages.append(self.show(events))
            self.num_answers += 1
            say(self.partner.footer)
        except KeyboardInterrupt:  # pressed twice: the reply is dropped, not the conversation
            self.messages = before
            say("interrupted")
        except ColibriError as error:
            self.messages, self.failure = before, error
            full = isinstance(error, ContextLengthError)
            say(f"{error}{'; or begin a new conversation with /reset' if full else ''}")

    def show(self, events: Iterable[Event]) -> dict[str, Any]:
        """Show an answer as it comes; return its message."""
        from colibri.text.dialects import Channel, TextDelta

        texts = dict.fromkeys(Channel, "")
        screen = open_screen(
            shows_reasoning=self.switches["reasoning"] == "show",
            markdown=self.switches["markdown"] == "on" and not self.partner.continues,
        )
        with screen:
            for event in events:
                self.reporter.close()
                if isinstance(event, TextDelta):
                    thinks = event.channel is Channel.REASONING
                    (screen.reasoning if thinks else screen.content)(event.text)
                    texts[event.channel] += event.text
            self.reporter.close()
        reasoning = texts[Channel.REASONING]
        thought = {"reasoning_content": reasoning} if reasoning else {}
        return {"role": "assistant", "content": texts[Channel.CONTENT], **thought}


def _counted(messages: list[dict[str, Any]]) -> str:
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"


def with_parameter(sampling: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """Sampling parameters with one more; an empty value takes it back.

    Raises:
        RequestError: there is no such parameter, or it does not take the value.
    """
    from colibri.llm.defaults import GenerationDefaults
    from colibri.llm.options import check_names

    try:
        read = json.loads(value) if value else None
    except ValueError:
        read = value
    if name == "stop":
        return {**sampling, "stop": [str(read)] if value else None}
    check_names([name])
    GenerationDefaults({}, Path(os.devnull)).params(**{name: read})
    return {**sampling, name: read}
