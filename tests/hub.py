"""A hub on this machine that speaks enough of the real one's HTTP, and misbehaves when told to."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LARGE = 256  # bytes from which on files are kept apart, under their SHA-256
COMMIT = "c0ffee" + "0" * 34
PIECE = 64 << 10


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """What it holds and how it behaves.

    Attributes:
        repos: files of each repository.
        commit: of every repository.
        faults: for a file's name, what its next answers suffer; the last one stays.
        token: what requests must show, if anything.
        asked: requests, as (path, range).
        sent: bytes of contents that were sent, by file.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    faults: dict[str, list[str]] = field(default_factory=dict)
    token: str | None = None
    listing: dict[str, Any] | None = None
    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    silence: threading.Event = field(default_factory=threading.Event)

    def add(self, repo: str, directory: Path) -> None:
        """Publish a directory."""
        self.repos[repo] = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    def fault(self, name: str) -> str:
        left = self.faults.get(name, [""])
        return left.pop(0) if len(left) > 1 else left[0]

    def about(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.repos[repo].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = git_sha1(data)
            if len(data) >= LARGE:
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": repo, "modelId": repo, "sha": self.commit, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.hub.asked.append((self.path, self.headers.get("Range")))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.refuse(401, "RepoNotFound")
            return
        path = unquote(self.path.partition("?")[0])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.about(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.content(*found.groups())
        else:
            self.refuse(404, "EntryNotFound")

    def about(self, repo: str, revision: str | None) -> None:
        if repo not in self.hub.repos:
            self.refuse(401, "RepoNotFound")
        elif revision not in (None, "main", self.hub.commit):
            self.refuse(404, "RevisionNotFound")
        else:
            self.answer(200, json.dumps(self.hub.listing or self.hub.about(repo)).encode())

    def content(self, repo: str, revision: str, name: str) -> None:
        data, fault = self.hub.repos[repo][name], self.hub.fault(name)
        if revision != self.hub.commit or fault == "gone":
            self.refuse(404, "EntryNotFound")
            return
        if fault == "busy":
            self.refuse(503)
            return
        if fault == "moved":  # as to another machine that keeps large files
            self.send_response(302)
            self.send_header("Location", f"{self.hub.url}{self.path}?there")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or fault == "whole":
            self.send(name, data, fault, 200, {})
            return
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        shift = 3 if fault == "shifted" else 0
        place = f"bytes {first + shift}-{last}/{len(data)}"
        self.send(name, data[first : last + 1], fault, 206, {"Content-Range": place})

    def send(self, name: str, data: bytes, fault: str, code: int, headers: dict[str, str]) -> None:
        if fault == "wrong":
            data = bytes(byte ^ 1 for byte in data)
        if fault == "longer":
            data += b"more"
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in ("cut", "silent"):
            data = data[: len(data) // 2]
        if fault == "mute":
            data = b""
        for start in range(0, len(data), PIECE):
            self.wfile.write(data[start : start + PIECE])
            self.hub.sent[name] += len(data[start : start + PIECE])
        self.wfile.flush()
        if fault in ("silent", "mute"):
            self.hub.silence.wait(10)
        self.close_connection = fault in ("cut", "silent", "mute")

    def refuse(self, code: int, why: str = "") -> None:
        self.answer(code, b"{}", {"X-Error-Code": why} if why else {})

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that leave in the middle are what is tested."""


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.silence.set()
        server.shutdown()
        server.server_close()
        thread.join()
