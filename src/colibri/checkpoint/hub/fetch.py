"""Brings one file of a repository here, in as many requests as that takes.

Bytes are appended to a file of their own, so that a killed program goes on where it was; the file
gets its name only when its digest is that which the hub has promised. What the server answers is
believed in nothing: a range that was not asked for, too many bytes and other bytes are found.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from colibri.checkpoint.hub.digest import Hasher, hash_file
from colibri.checkpoint.hub.meter import Meter
from colibri.checkpoint.hub.repository import HubFile, reason, transport_errors
from colibri.checkpoint.writing import write_errors
from colibri.errors import Cancelled, HubError

_TOO_MANY_OR_FAILING = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    Attributes:
        silent_s: without a byte, after which a connection is given up; None is what
            huggingface_hub says (HF_HUB_DOWNLOAD_TIMEOUT).
        slow_s: a connection that brings fewer than `least_bytes` in this time is given up too.
        least_bytes: see there.
        attempts: that may fail one after another without having brought a byte.
        pause_s: before the second attempt; it doubles from one to the next.
    """

    silent_s: float | None = None
    slow_s: float = 60.0
    least_bytes: int = 64 << 10
    attempts: int = 5
    pause_s: float = 1.0

    @property
    def read_s(self) -> float:
        """`silent_s`, or what huggingface_hub says."""
        from huggingface_hub import constants

        return constants.HF_HUB_DOWNLOAD_TIMEOUT if self.silent_s is None else self.silent_s


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the hub.

    Attributes:
        url: where it is asked for; servers may send on to others.
        headers: of every request, a token among them.
        file: what is expected.
    """

    url: str
    headers: dict[str, str]
    file: HubFile

    @classmethod
    def of(cls, repo: str, commit: str, file: HubFile) -> Remote:
        """A file of a repository at a commit, asked for in the name of whoever is logged in."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(repo, file.name, revision=commit)
        # Ranges count the bytes of the file, not those of a compressed answer.
        return cls(url, {**build_hf_headers(), "Accept-Encoding": "identity"}, file)

    def read(self, start: int, nbytes: int, patience: Patience) -> bytes:
        """A range of the file; raises HubError."""
        last = min(start + nbytes, self.file.nbytes) - 1
        for pause in _pauses(self, patience):
            with pause.failures(), self.open(start, patience, last) as response:
                if _first_byte(self, response, start) != start:
                    raise HubError(
                        f"{self.file.name}: the server does not send parts of files: nothing can be"
                        " said without the whole of it; leave --plan out"
                    )
                wanted, found = last + 1 - start, bytearray()
                for piece in response.iter_bytes():
                    found += piece
                    if len(found) >= wanted:  # all of it: some send the rest of the file too
                        return bytes(found[:wanted])
                raise _RetryError(f"it ended the answer after {len(found)} of {wanted} bytes")
        raise AssertionError("unreachable")

    @contextmanager
    def open(self, start: int, patience: Patience, last: int | None = None) -> Iterator[Any]:
        """The answer to a request for the bytes from `start` on."""
        from huggingface_hub import get_session

        headers = dict(self.headers)
        if start or last is not None:
            headers["Range"] = f"bytes={start}-{'' if last is None else last}"
        stream = get_session().stream(
            "GET", self.url, headers=headers, timeout=patience.read_s, follow_redirects=True
        )
        with stream as response:
            if response.status_code in _TOO_MANY_OR_FAILING:
                raise _RetryError(f"it answers {response.status_code}")
            if response.status_code >= 400:
                raise HubError(f"{self.file.name}: the hub answers {_status(response)}")
            yield response


def fetch(
    remote: Remote,
    part: Path,
    target: Path,
    *,
    patience: Patience,
    meter: Meter,
    stop: threading.Event,
) -> None:
    """Fill `part` from where it ends, check it, and rename it to `target`.

    Args:
        remote: what is fetched.
        part: beside `target`; what is there is the beginning of the file.
        target: where the file goes.
        patience: how long the server is waited for.
        meter: counts what comes.
        stop: ends it, in the middle of the file; what is there stays.

    Raises:
        HubError: the server is silent, refuses, or sends other bytes than the hub has promised.
        WriteError: the file cannot be written.
        Cancelled: `stop` was set.
    """
    with write_errors(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        for is_last in (False, True):  # a wrong beginning may be older than the server's answers
            if _try(remote, part, patience, meter, stop):
                part.rename(target)
                return
            meter.correct(-remote.file.nbytes)
            part.unlink()
            if is_last:
                break
    wanted, name = remote.file.digest, remote.file.name
    raise HubError(
        f"{name}: twice the server sent other bytes than the hub promises ({wanted}); nothing of "
        "them is kept: try again later, or tell who runs the repository"
    )


def _try(
    remote: Remote,
    part: Path,
    patience: Patience,
    meter: Meter,
    stop: threading.Event,
) -> bool:
    """Whether the whole file is in `part` with the digest that it should have."""
    wanted = remote.file
    with part.open("a+b") as out:
        out.seek(0, os.SEEK_END)
        if out.tell() > wanted.nbytes:
            out.truncate(0)
        hasher, done = Hasher(wanted.digest.kind, wanted.nbytes), out.tell()
        hash_file(part, hasher, done, meter.correct)
        filling = _Filling(remote, out, hasher, done, meter, stop)
        for pause in _pauses(remote, patience, stop):
            if filling.done == wanted.nbytes:
                break
            before = filling.done
            with pause.failures():
                filling.run(patience)
            pause.worked = filling.done > before
        out.flush()
        os.fsync(out.fileno())
    return filling.hasher.digest() == wanted.digest


@dataclass(slots=True)
class _Filling:
    """A file that grows."""

    remote: Remote
    out: BinaryIO
    hasher: Hasher
    done: int
    meter: Meter
    stop: threading.Event

    def run(self, patience: Patience) -> None:
        """Take what one answer brings."""
        wanted = self.remote.file
        with self.remote.open(self.done, patience) as response:
            if _first_byte(self.remote, response, self.done) == 0 < self.done:
                self._begin_anew()
            since, until = 0, time.monotonic() + patience.slow_s
            for piece in response.iter_bytes():
                if self.stop.is_set():
                    raise Cancelled("stopped")
                self._take(piece[: wanted.nbytes - self.done])
                since += len(piece)
                if time.monotonic() > until:
                    if since < patience.least_bytes:
                        raise _RetryError(f"it sent {since} bytes in {patience.slow_s:.0f} s")
                    since, until = 0, time.monotonic() + patience.slow_s
                if self.done == wanted.nbytes:
                    break
        if self.done < wanted.nbytes:
            raise _RetryError(f"it ended the answer after {self.done} of {wanted.nbytes} bytes")

    def _take(self, piece: bytes) -> None:
        self.out.write(piece)
        self.hasher.update(piece)
        self.done += len(piece)
        self.meter.add(len(piece))

    def _begin_anew(self) -> None:
        """The server sends the whole file, whatever range was asked for."""
        self.meter.correct(-self.done)
        self.out.truncate(0)
        wanted = self.remote.file
        self.hasher, self.done = Hasher(wanted.digest.kind, wanted.nbytes), 0


class _RetryError(Exception):
    """An answer that another request may better."""


def _first_byte(remote: Remote, response: Any, start: int) -> int:
    """Where in the file the answer begins: `start`, or 0 where ranges are not heeded."""
    if response.status_code != 206:
        return 0
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    size = str(remote.file.nbytes)
    if found is None or int(found[1]) != start or found[2] not in (size, "*"):
        raise HubError(
            f"{remote.file.name}: asked for bytes from {start} of {size} on, the server answers "
            f"with {response.headers.get('Content-Range')!r}: try again later"
        )
    return start


@dataclass(slots=True)
class _Pause:
    """One attempt; `worked` says whether it brought anything."""

    worked: bool = False
    failure: str = ""

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Note why an attempt failed, where another one may not."""
        try:
            yield
        except _RetryError as error:
            self.failure = str(error)
        except transport_errors() as error:
            timed_out = "imeout" in type(error).__name__
            self.failure = "it is silent" if timed_out else f"it failed: {reason(error)}"


def _pauses(
    remote: Remote, patience: Patience, stop: threading.Event | None = None
) -> Iterator[_Pause]:
    """Attempts until whoever asks is content, or too many in a row brought nothing.

    Raises:
        HubError: they did.
        Cancelled: `stop` was set.
    """
    failed, waiting = 0, stop or threading.Event()
    while True:
        if waiting.is_set():
            raise Cancelled("stopped")
        yield (attempt := _Pause())
        failed = 0 if attempt.worked else failed + 1
        if failed >= patience.attempts:
            raise HubError(
                f"{remote.file.name}: the server does not send it: {attempt.failure}, "
                f"{failed} times in a row; run the same command again to go on"
            )
        if attempt.failure:
            waiting.wait(patience.pause_s * 2**failed / 2)


def _status(response: Any) -> str:
    """A refusal in words."""
    code = response.status_code
    why = response.headers.get("X-Error-Message") or response.reason_phrase
    advice = ": log in with `hf auth login` or set HF_TOKEN" if code in (401, 403) else ""
    return f"{code} ({why}){advice}"
