"""A client that leaves, at whatever moment, frees what was computed for it."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.unit.server.endpoints import ENDPOINTS, Endpoint, each
from tests.unit.server.scripted import CONTEXT, Running, running, write_model


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as raw:
        yield raw


def request(endpoint: Endpoint, stream: bool, length: int = 0) -> bytes:
    """A whole request; `length` pretends that its body is longer."""
    body = json.dumps({**endpoint.body("q"), "stream": stream}).encode()
    size = length or len(body)
    head = f"POST {endpoint.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


@each()
def test_in_prefill(server: Running, endpoint: Endpoint, stream: bool) -> None:
    reached = threading.Event()

    def gate(step: int) -> bool:
        reached.set()
        return False

    server.service.gate = gate
    with connected(server) as raw:
        raw.sendall(request(endpoint, stream))
        assert reached.wait(10)
    assert server.service.was_cancelled.wait(10)
    assert server.service.num_tokens == 0


@each()
def test_in_decode(server: Running, endpoint: Endpoint, stream: bool) -> None:
    reached = threading.Event()

    def gate(step: int) -> bool:
        if step > 5:
            reached.set()
        return step <= 5

    server.service.replies = ["x" * CONTEXT]
    server.service.gate = gate
    with connected(server) as raw:
        raw.sendall(request(endpoint, stream))
        assert reached.wait(10)
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    assert server.service.was_cancelled.wait(10)
    assert server.service.num_tokens == 5


def test_before_the_body_is_there(server: Running, http: httpx.Client) -> None:
    before = server.serving.counters.disconnects
    with connected(server) as raw:
        raw.sendall(request(ENDPOINTS[0], True, length=10_000))
    assert http.get("/health").status_code == 200
    while server.serving.counters.disconnects == before:
        http.get("/health")
    assert server.service.requests == []


def test_many_disconnects_leave_nothing(server: Running, http: httpx.Client) -> None:
    server.service.replies = ["x" * CONTEXT]
    endpoint = ENDPOINTS[0]
    for index in range(50):
        server.service.was_cancelled.clear()
        server.service.gate = lambda step: False
        with connected(server) as raw:
            raw.sendall(request(endpoint, index % 2 == 0))
            while not server.service.in_flight:
                pass
        assert server.service.was_cancelled.wait(10)
    server.service.gate = lambda step: True
    server.service.replies = ["fine"]
    assert endpoint.ask(http, "q", True).content == "fine"
    # The answer may be there before its task has ended; of these requests one is counted, this one.
    while server.service.in_flight or server.serving.counters.in_flight > 1:
        http.get("/health")


def test_a_client_that_takes_nothing_is_given_up(tmp_path: Path) -> None:
    with running(write_model(tmp_path / "m"), send_s=0.2) as server:
        server.service.replies = ["x" * CONTEXT]
        endpoint = ENDPOINTS[0]
        # More than the system buffers: megabytes of log probabilities.
        much = {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({**endpoint.body("q"), **much}).encode()
        head = f"POST {endpoint.path} HTTP/1.1\r\nHost: localhost\r\n"
        url = urlsplit(server.url)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((url.hostname, url.port))
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert server.service.was_cancelled.wait(60)


def test_a_quiet_stream_says_that_it_lives(server: Running) -> None:
    server.service.gate = lambda step: False
    with connected(server) as raw:
        raw.sendall(request(ENDPOINTS[0], True))
        data = b""
        while b": still here" not in data:
            data += raw.recv(4096)
    assert server.service.was_cancelled.wait(10)
