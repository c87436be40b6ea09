"""Two looks at a server, and what came between."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from colibri.errors import RequestError
from colibri.lab.watch import Sight, Watched


def told(requests: int = 1, **others: Any) -> dict[str, Any]:
    experts = {
        **{"requests": 100, "hits": 60, "misses": 40, "wanted": 0, "foreseen": 0},
        **{"bytes_read": 4000, "slack_bytes": 0, "abandoned_bytes": 0, "table_bytes": 0},
        **{"ahead_wasted_bytes": 0},
    }
    engine = {
        **{"num_requests": requests, "completion_tokens": 10, "prompt_tokens": 20},
        **{"reused_tokens": 5, "num_running": 2, "num_waiting": 1, "num_prefixes": 3},
        **{"kv_blocks": 8, "kv_free_blocks": 6, "rss_bytes": 700, "ram_budget_bytes": 1000},
        **{"lossy": ["kv=int8"], "experts": experts | others.pop("experts", {})},
    }
    answers = [{"path": "/v1/models", "status": 200, "count": 4}]
    answers.append({"path": "/v1/nothing", "status": 404, "count": 3})
    server = {"rss_bytes": 50, "disconnects": 2, "answers": answers}
    return {"model": "m", "health": "ready", "engine": engine | others, "server": server}


def test_rates_are_of_what_came_between() -> None:
    later = told(
        requests=2,
        completion_tokens=30,
        prompt_tokens=120,
        reused_tokens=25,
        experts={"requests": 200, "hits": 150, "wanted": 40, "foreseen": 30, "bytes_read": 9000},
    )
    sight = Sight.between(told(), later, 2.0)
    assert sight.decode_tokens_per_s == 10
    assert sight.prompt_tokens_per_s == 40
    assert (sight.hit_rate, sight.recall) == (0.9, 0.75)
    assert sight.disk_bytes_per_s == 2500
    assert (sight.num_running, sight.num_waiting, sight.num_prefixes) == (2, 1, 3)
    assert (sight.kv_share, sight.rss_bytes, sight.budget_bytes) == (0.25, 750, 1000)
    assert (sight.disconnects, sight.refused, sight.lossy) == (2, 3, ("kv=int8",))


def test_where_nothing_happens_there_are_no_rates() -> None:
    sight = Sight.between(told(), told(), 1.0)
    assert sight.decode_tokens_per_s is None
    assert sight.hit_rate is None
    assert sight.disk_bytes_per_s == 0


def test_a_server_that_was_started_anew_is_seen_from_its_start() -> None:
    assert Sight.between(told(requests=9), told(), 1.0).decode_tokens_per_s == 10


def test_an_engine_that_is_being_started_again() -> None:
    sight = Sight.between(told(), {**told(), "engine": None, "health": "restarting"}, 1.0)
    assert (sight.health, sight.num_running, sight.kv_share) == ("restarting", 0, 0.0)


class Stats(BaseHTTPRequestHandler):
    """Says what it is told to."""

    answer: tuple[int, bytes] = (200, b"")

    def do_GET(self) -> None:
        status, body = self.answer
        self.send_response(status if self.path == "/stats" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    running = HTTPServer(("127.0.0.1", 0), Stats)
    thread = Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def test_addresses(server: str) -> None:
    Stats.answer = (200, json.dumps(told()).encode())
    for url in (server, f"{server}/v1", server.removeprefix("http://")):
        assert Watched(url).look()["model"] == "m"
    for url in ("ftp://x", "http://"):
        with pytest.raises(RequestError, match="must be an address"):
            Watched(url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, b"{}"), "refuses the key"),
        ((200, b"<html>"), "is no server of Colibri"),
        ((200, b"[]"), "is no server of Colibri"),
        ((500, b"{}"), "is no server of Colibri"),
    ],
)
def test_answers_that_are_none(server: str, answer: tuple[int, bytes], message: str) -> None:
    Stats.answer = answer
    with pytest.raises(RequestError, match=message):
        Watched(server).look()


def test_nobody_there() -> None:
    with pytest.raises(RequestError, match=r"nobody answers .*coli serve"):
        Watched("127.0.0.1:1").look()
