"""A thousand requests, a third of them with faults: no leak, no hang, no wrong answer."""

import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.unit.server.counter_model import CONTENT, write_counter
from tests.unit.server.endpoints import ENDPOINTS, Endpoint
from tests.unit.server.served import Served, children

pytestmark = pytest.mark.slow
REQUESTS = 1000
CHATS = [endpoint for endpoint in ENDPOINTS if endpoint.chats]


class Client:
    """Asks at random, rightly and wrongly; counts what it did."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.at = urlsplit(url)
        self.done: Counter[str] = Counter()

    def one(self, seed: int) -> None:
        draw = random.Random(seed)
        endpoint = draw.choice(CHATS)
        kinds = ["good"] * 6 + ["bad_json", "cut_body", "leaves", "reads_little", "too_long"]
        kind = draw.choice(kinds)
        getattr(self, kind)(endpoint, draw)
        self.done[kind] += 1

    def good(self, endpoint: Endpoint, draw: random.Random) -> None:
        prompt = "x" * draw.randrange(1, 150)
        answer = endpoint.ask(self.http, prompt, draw.random() < 0.5)
        assert answer.content.startswith(CONTENT)
        assert answer.reasoning == "hm"

    def bad_json(self, endpoint: Endpoint, draw: random.Random) -> None:
        whole = json.dumps(endpoint.body("q"))
        broken = whole[: draw.randrange(len(whole))]
        assert self.http.post(endpoint.path, content=broken).status_code == 400

    def too_long(self, endpoint: Endpoint, draw: random.Random) -> None:
        assert endpoint.post(self.http, "x" * 600, True).status_code == 400

    def cut_body(self, endpoint: Endpoint, draw: random.Random) -> None:
        self._raw(endpoint, more=draw.randrange(1, 1000), read=0)

    def leaves(self, endpoint: Endpoint, draw: random.Random) -> None:
        self._raw(endpoint, more=0, read=0)

    def reads_little(self, endpoint: Endpoint, draw: random.Random) -> None:
        self._raw(endpoint, more=0, read=draw.randrange(1, 400))

    def _raw(self, endpoint: Endpoint, more: int, read: int) -> None:
        body = json.dumps({**endpoint.body("some words"), "stream": True}).encode()
        head = f"POST {endpoint.path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body) + more}\r\n\r\n"
        with socket.create_connection((self.at.hostname, self.at.port), timeout=60) as raw:
            raw.sendall(head.encode() + body)
            if read:
                assert raw.recv(read)


def resident(served: Served) -> int:
    """Bytes of server and engine."""
    pids = [served.process.pid, *children(served.process.pid)]
    texts = [Path(f"/proc/{pid}/statm").read_text() for pid in pids]
    return sum(int(text.split()[1]) * 4096 for text in texts)


def test_a_thousand_requests(tmp_path: Path) -> None:
    model = write_counter(tmp_path / "scripted")
    served = Served("--model", str(model), "--cache-dir", str(tmp_path), "--context-length", "256")
    try:
        served.wait_for("scripted is ready")
        client = Client(served.url)
        with client.http, ThreadPoolExecutor(8) as pool:
            list(pool.map(client.one, range(REQUESTS // 4)))
            before = resident(served)
            list(pool.map(client.one, range(REQUESTS // 4, REQUESTS)))
            client.good(ENDPOINTS[0], random.Random(0))
            while client.http.get("/health").json()["in_flight"]:
                pass
            grown = resident(served) - before
            print(dict(client.done), f"grown by {grown / 2**20:.1f} MiB from {before / 2**20:.0f}")
            assert client.http.get("/health").json()["ready"]
            assert grown < 0.05 * before
    finally:
        assert served.stop() == 0
