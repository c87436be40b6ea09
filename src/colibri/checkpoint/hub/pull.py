"""Brings a repository's files here: several at a time, each checked, and told as it goes."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from colibri.checkpoint.hub.fetch import Patience, Remote, fetch
from colibri.checkpoint.hub.meter import Meter, PullProgress
from colibri.checkpoint.hub.place import Place
from colibri.checkpoint.hub.repository import HubFile, Listing
from colibri.checkpoint.writing import write_errors
from colibri.errors import HubError
from colibri.units import format_bytes

_CONNECTIONS = 8
_TOLD_EVERY_S = 0.1


def _prepare(place: Place, files: Sequence[HubFile], again: bool) -> list[HubFile]:
    """Take in what is there; the rest is returned."""
    with write_errors(place.root):
        place.begin()
        wanted = missing(place, files, again=again)
        require_room(place, wanted, again=again)
        for file in files:
            if file not in wanted:
                place.add(file)
            elif again:
                place.part(file).unlink(missing_ok=True)
    return wanted


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did.

    Attributes:
        directory: where the model is.
        num_files: that were chosen.
        total_bytes: of them.
        fetched_bytes: that came over the network for them now.
        elapsed_s: the time it took.
    """

    directory: Path
    num_files: int
    total_bytes: int
    fetched_bytes: int
    elapsed_s: float


def missing(place: Place, files: Sequence[HubFile], *, again: bool = False) -> list[HubFile]:
    """Those that are not there, or all of them; the beginnings of some may be."""
    return [file for file in files if again or not place.has(file)]


def require_room(place: Place, files: Sequence[HubFile], *, again: bool = False) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        HubError: says how much is missing.
    """
    needed = sum(file.nbytes - (0 if again else _begun(place, file)) for file in files)
    above = (place.root, *place.root.absolute().parents)
    free = shutil.disk_usage(next(path for path in above if path.exists())).free
    if needed > free:
        raise HubError(
            f"{place.root}: {format_bytes(needed)} are to be fetched, but only "
            f"{format_bytes(free)} are free: make room for {format_bytes(needed - free)} more, or "
            "name a directory on another disk by --dir"
        )


def _begun(place: Place, file: HubFile) -> int:
    part = place.part(file)
    return min(part.stat().st_size, file.nbytes) if part.is_file() else 0


@dataclass(slots=True)
class _Job:
    """Files on their way, and the threads that bring them."""

    listing: Listing
    place: Place
    files: Sequence[HubFile]
    patience: Patience
    meter: Meter
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    waiting: queue.SimpleQueue[HubFile] = field(default_factory=queue.SimpleQueue)
    taking_in: threading.Lock = field(default_factory=threading.Lock)

    def run(self, progress: Callable[[PullProgress], None] | None) -> None:
        for file in self.files:
            self.waiting.put(file)
        threads = [
            # A thread that waits for a silent server must not hold up the end of the program.
            threading.Thread(target=self._work, daemon=True)
            for _ in range(min(_CONNECTIONS, len(self.files)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive() and not self.failures:
                    if progress is not None:
                        progress(self.meter.progress())
                    thread.join(_TOLD_EVERY_S)
        finally:
            self.stop.set()
        if self.failures:
            raise self.failures[0]
        if progress is not None:
            progress(self.meter.progress())

    def _work(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    file = self.waiting.get_nowait()
                except queue.Empty:
                    return
                self._bring(file)
        except BaseException as error:  # it is raised where the job was begun
            self.failures.append(error)
            self.stop.set()

    def _bring(self, file: HubFile) -> None:
        remote = Remote.of(self.listing.name.repo, self.listing.commit, file)
        part, target = self.place.part(file), self.place.target(file)
        fetch(remote, part, target, patience=self.patience, meter=self.meter, stop=self.stop)
        with self.taking_in, write_errors(target):
            self.place.add(file)


def pull(
    listing: Listing,
    files: Sequence[HubFile],
    place: Place,
    *,
    again: bool = False,
    patience: Patience | None = None,
    progress: Callable[[PullProgress], None] | None = None,
) -> PullReport:
    """Bring `files` of a repository to `place`.

    Args:
        listing: what the repository holds.
        files: those of them that are wanted.
        place: where they go; what is there is not fetched again.
        again: fetch everything, whatever is there.
        patience: how long servers are waited for.
        progress: told every tenth of a second, and at the end.

    Raises:
        HubError: the disk has no room, another pull is at work there, the hub does not answer, or
            it sends other bytes than it promises.
        WriteError: a file cannot be written.
    """
    began = time.monotonic()
    with write_errors(place.root):
        lock = place.alone()
    with lock:
        wanted = _prepare(place, files, again)
        total = sum(file.nbytes for file in files)
        here = total - sum(file.nbytes for file in wanted)
        meter = Meter(here, total)
        _Job(listing, place, wanted, patience or Patience(), meter).run(progress)
    return PullReport(
        directory=place.directory,
        num_files=len(files),
        total_bytes=total,
        fetched_bytes=meter.came,
        elapsed_s=time.monotonic() - began,
    )
