"""A conversation in the terminal: its messages, and what a line of input does to them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri.cli.chat_partners import Partner
from colibri.cli.interrupt import interruptible
from colibri.cli.progress import Reporter
from colibri.cli.run import CONTROLS
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
/set [NAME VALUE]  set a sampling parameter, or `reasoning` to show or hide; without, show them
/tokens            how much of the context the conversation takes
/stats             what has happened so far
/quit              leave (exit, quit and Ctrl-D do it too)
Ctrl-C stops an answer. On a terminal, Alt-Enter begins a new line."""

LEAVE = ("/quit", "/exit", "exit", "quit")
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
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
    shows_reasoning: bool = True
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
        if not word.startswith("/"):
            if word:
                self.answer(line)
            return
        command = self.commands().get(word)
        if command is None:
            say(f"There is no command {word}; /help lists them.")
            return
        try:
            command(rest.strip())
        except (ColibriError, OSError) as error:
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
        path = Path(name).expanduser()
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False))
        beside.replace(path)
        say(f"{len(self.messages)} messages are in {path}.")

    def _load(self, name: str) -> None:
        if not name:
            raise RequestError("/load needs the name of a file")
        messages = read_conversation(Path(name).expanduser())
        self.messages = messages
        first = messages[0] if messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        say(f"A conversation of {len(messages)} messages goes on.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            shown = {"reasoning": "show" if self.shows_reasoning else "hide", **self.sampling}
            say(", ".join(f"{k} {v}" for k, v in shown.items() if v is not None))
        elif name == "reasoning":
            if value not in ("show", "hide"):
                raise RequestError(f"reasoning is {value!r}: it must be show or hide")
            self.shows_reasoning = value == "show"
        else:
            self.sampling = with_parameter(self.sampling, name, value.strip())

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
        """Print an answer as it comes; return its message.

        Reasoning is shown on a terminal only, dimmed.
        """
        from colibri.text.dialects import Channel, TextDelta

        is_terminal = sys.stdout.isatty()
        texts = dict.fromkeys(Channel, "")
        for event in events:
            self.reporter.close()
            if not isinstance(event, TextDelta):
                continue
            if event.channel is Channel.CONTENT:
                if texts[Channel.REASONING] and not texts[Channel.CONTENT] and is_terminal:
                    print("\n")
                print(_harmless(event.text), end="", flush=True)
            elif is_terminal and self.shows_reasoning:
                print(f"{_DIM}{_harmless(event.text)}{_PLAIN}", end="", flush=True)
            texts[event.channel] += event.text
        print(flush=True)
        reasoning = texts[Channel.REASONING]
        thought = {"reasoning_content": reasoning} if reasoning else {}
        return {"role": "assistant", "content": texts[Channel.CONTENT], **thought}


def _harmless(text: str) -> str:
    """A text that moves no cursor."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def read_conversation(path: Path) -> list[dict[str, Any]]:
    """Messages that `/save` wrote.

    Raises:
        RequestError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
            raise TypeError("a message without text")
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} holds no conversation: {error}") from error
    return [dict(message) for message in messages]


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


def say(text: str) -> None:
    """Tell people something; stdout is for answers alone."""
    print(text, file=sys.stderr, flush=True)
