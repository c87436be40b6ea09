"""A server of our own in a process of its own, asked over HTTP as any client would."""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colibri.errors import ColibriError, EngineDiedError
from colibri.settings import Settings, flag_of

_PAGE = 4096
_END_S = 30.0
_LISTENING = re.compile(r"listening on http://\[?([^]\s]+?)\]?:(\d+),")
_READY = re.compile(r" is ready: ")
_OWN = ("host", "port", "api_key", "expose", "allowed_host", "max_connections")
_DEFAULTS = Settings().as_dict()


def flags_of(settings: Settings) -> list[str]:
    """The flags of `coli serve` that give it these settings."""
    found: list[str] = []
    for name, value in settings.as_dict().items():
        if value == _DEFAULTS[name] or name in _OWN:
            continue
        for each in value if isinstance(value, tuple | list) else (value,):
            found += [flag_of(name), _spelled(name, each)]
    return found


def _spelled(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if name == "expert_slots" and isinstance(value, float):
        return f"{value:.4%}"
    return str(value)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of server and engine, and bytes of both that are resident."""

    server_s: float
    engine_s: float
    rss_bytes: int


class ServedProcess:
    """`coli serve` with its engine. Close it.

    Raises:
        EngineDiedError: it ended before it was ready; the message is what it said.
    """

    def __init__(self, settings: Settings) -> None:
        command = [sys.executable, "-m", "colibri", "serve", "--port", "0", *flags_of(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        assert self._process.stderr is not None
        try:
            listening = self._wait_for(_LISTENING)
            self.address = (listening[1], int(listening[2]))
            self._wait_for(_READY)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._process.stderr.close()
            raise
        self._rest = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._rest.start()
        self._engine = _children(self._process.pid)

    def _wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            found = pattern.search(line)
            if found is not None:
                return found
        self._process.wait()
        raise EngineDiedError(f"the server of the bench ended: {''.join(self._said[-3:]).strip()}")

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        connection = http.client.HTTPConnection(*self.address)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def cost(self) -> Cost:
        """What both processes have cost so far, and hold now."""
        pids = [self._process.pid, *self._engine]
        rss = sum(int(_text(pid, "statm").split()[1] or 0) * _PAGE for pid in pids)
        return Cost(_cpu_s(pids[0]), sum(map(_cpu_s, pids[1:])), rss)

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._rest.join()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _text(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="ascii")


def _children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text(encoding="ascii").split()]


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process that live."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    texts = ((thread / "schedstat").read_text(encoding="ascii") for thread in threads)
    return sum(int(text.split()[0]) for text in texts) / 1e9


@dataclass(slots=True)
class Heard:
    """A streamed reply as it came.

    Attributes:
        asked: when it was asked for, on `time.monotonic`.
        times: when each event with tokens came.
        tokens: how many it brought.
        is_whole: whether it came to its end.
    """

    asked: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_whole: bool = False

    @property
    def ttft_s(self) -> float | None:
        """From asking to the first token; None where none came."""
        return self.times[0] - self.asked if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Streaming(threading.Thread):
    """Asks again and again for replies to new prompts, until it is stopped.

    Attributes:
        heard: all of them, the last one perhaps in part.
        error: what the server refused with.
        is_stopped: set it to end.
    """

    def __init__(
        self, address: tuple[str, int], bodies: Sequence[Mapping[str, Any]] | Prompts
    ) -> None:
        """`bodies` are those of `/completion`, one a reply."""
        super().__init__(daemon=True)
        self._address, self._bodies = address, bodies
        self.heard: list[Heard] = []
        self.error: Exception | None = None
        self.is_stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """See `threading.Thread.run`."""
        try:
            for body in self._bodies:
                if self.is_stopped.is_set():
                    return
                self._ask(body)
        except Exception as error:  # told in `end`, where somebody looks
            self.error = error

    def _ask(self, body: Mapping[str, Any]) -> None:
        connection = http.client.HTTPConnection(*self._address)
        heard = Heard(time.monotonic())
        self.heard.append(heard)
        connection.request("POST", "/completion", json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        if response.status != 200:
            raise ColibriError(f"the server refused: {response.read().decode()}")
        while not self.is_stopped.is_set() and (line := response.readline()):
            if not line.startswith(b"data: "):
                continue
            now, event = time.monotonic(), json.loads(line[6:])
            if event.get("token_ids"):
                heard.times.append(now)
                heard.tokens.append(len(event["token_ids"]))
            heard.is_whole |= "usage" in event
        connection.close()

    def end(self) -> list[Heard]:
        """Stop asking; what was heard.

        Raises:
            ColibriError: the server refused.
        """
        self.is_stopped.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.heard


class Prompts:
    """Bodies of `/completion` without end: new random ids each time, greedy replies."""

    def __init__(self, prompt_tokens: int, max_tokens: int, vocab_size: int, seed: int) -> None:
        self._sizes = prompt_tokens, max_tokens
        self._vocab_size, self._random = vocab_size, random.Random(seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        prompt_tokens, max_tokens = self._sizes
        ids = [self._random.randrange(self._vocab_size) for _ in range(prompt_tokens)]
        return {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
