"""Who may ask, how much, and how problems are told."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from colibri.server.guard import host_name
from tests.unit.server.endpoints import ENDPOINTS, Endpoint, each_path
from tests.unit.server.scripted import Running, running, write_model

PAGE = "https://page.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("guard") / "scripted"
    with running(
        write_model(directory), api_key="s3cret", cors_origins=(PAGE,), max_body_bytes=5000,
        body_s=0.3,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def stranger(guarded: Running) -> Iterator[httpx.Client]:
    guarded.service.reset()
    with httpx.Client(base_url=guarded.url, timeout=10) as client:
        yield client


KEY = {"authorization": "Bearer s3cret"}


@each_path
def test_keys(stranger: httpx.Client, endpoint: Endpoint) -> None:
    body = endpoint.body("q")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wréng".encode()}):
        refused = stranger.post(endpoint.path, json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]
    for headers in (KEY, {"authorization": "bearer s3cret"}, {"x-api-key": "s3cret"}):
        assert stranger.post(endpoint.path, json=body, headers=headers).status_code == 200


def test_health_needs_no_key(stranger: httpx.Client) -> None:
    assert stranger.get("/health").status_code == 200
    assert stranger.get("/metrics").status_code == 401


@each_path
def test_hosts(stranger: httpx.Client, endpoint: Endpoint) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil", ""):
        headers = {**KEY, "host": host}
        answer = stranger.post(endpoint.path, json=endpoint.body("q"), headers=headers)
        assert answer.status_code == 403
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:9"):
        headers = {**KEY, "host": host}
        answer = stranger.post(endpoint.path, json=endpoint.body("q"), headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [("a:1", "a"), ("[::1]:1", "::1"), ("", ""), ("[", ""), ("A.B", "a.b"), ("a:b:c", "a")],
)
def test_host_names(host: str, name: str) -> None:
    assert host_name(host) == name


def test_web_pages(stranger: httpx.Client) -> None:
    path, body = ENDPOINTS[0].path, ENDPOINTS[0].body("q")
    foreign = stranger.post(path, json=body, headers={**KEY, "origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    shared = stranger.post(path, json=body, headers={**KEY, "origin": PAGE})
    assert (shared.status_code, shared.headers["access-control-allow-origin"]) == (200, PAGE)
    asked = stranger.options(path, headers={"origin": PAGE})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, PAGE)
    assert stranger.options(path, headers={"origin": "https://evil.example"}).status_code == 403


def test_bodies_that_are_too_large(stranger: httpx.Client) -> None:
    path = ENDPOINTS[0].path
    assert stranger.post(path, content=b"x" * 5001, headers=KEY).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(6):
            yield b"x" * 1000

    assert stranger.post(path, content=pieces(), headers=KEY).status_code == 413


def test_bodies_that_do_not_come(guarded: Running) -> None:
    url = urlsplit(guarded.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Authorization: Bearer s3cret\r\n\r\n{"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_headers_that_are_too_large(guarded: Running) -> None:
    url = urlsplit(guarded.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000)
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def test_every_api_has_its_own_envelope(stranger: httpx.Client) -> None:
    error = stranger.post("/v1/completions", json={}).json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert stranger.post("/v1/messages", json={}).json()["type"] == "error"
    assert isinstance(stranger.post("/api/chat", json={}).json()["error"], str)
