"""A command on a terminal of its own, which knows what its screen shows."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Any, Self

import pyte

ROWS, COLUMNS = 40, 100
_PATIENCE_S = 100.0
_QUESTION = b"\x1b[6n"  # where is the cursor?


class Terminal:
    """Keys go in with `types`, and what there is to see is waited for with `sees`.

    Attributes:
        screen: what it shows now.
        raw: everything that was written to it.
    """

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._master = master
        self.process = subprocess.Popen(
            [sys.executable, "-m", "colibri", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)

    @property
    def text(self) -> str:
        """All lines, those that have left the screen too."""
        above = ["".join(line[x].data for x in range(COLUMNS)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip()

    def wipe(self) -> None:
        """Forget what is to be seen."""
        self.screen.reset()
        self.raw = b""

    def types(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def sees(self, pattern: str) -> re.Match[str]:
        """Wait until the text matches."""
        until = time.monotonic() + _PATIENCE_S
        while (found := re.search(pattern, self.text, re.DOTALL)) is None:
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"{pattern!r} is not to be seen:\n{self.text.rstrip()}")
        return found

    def ends(self) -> int:
        """Wait until the command ends."""
        while self._read(_PATIENCE_S):
            pass
        return self.process.wait(_PATIENCE_S)

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, timeout))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody writes any more
            return False
        self.raw += data
        self._stream.feed(data)
        for _ in range(data.count(_QUESTION)):
            cursor = self.screen.cursor
            self.types(f"\x1b[{cursor.y + 1};{cursor.x + 1}R")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def styled(terminal: Terminal, text: str) -> Any:
    """The first letter of a text on the screen, with its looks."""
    for y, line in enumerate(terminal.screen.display):
        if (x := line.find(text)) >= 0:
            return terminal.screen.buffer[y][x]
    raise AssertionError(f"{text!r} is not to be seen:\n{terminal.text}")
