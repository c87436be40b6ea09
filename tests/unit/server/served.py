"""`coli serve` as a process of its own."""

import re
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "colibri.cli.main", "serve", "--port", "0"]


class Served:
    """The process and where it listens."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self.said = ""
        self.url = self.wait_for(r"listening on (http://\S+),")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            found = re.search(pattern, line)
            if found:
                return found
        self.stop(signal.SIGKILL)
        raise AssertionError(self.said)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.said += self.process.stderr.read()
        self.process.stderr.close()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
