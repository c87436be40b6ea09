"""What the server tells of itself."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from colibri.engine.service import Health
from colibri.errors import EngineDiedError
from tests.unit.server.endpoints import ENDPOINTS
from tests.unit.server.scripted import Running


def test_health(server: Running, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "ready": True, "in_flight": 0}
    server.service.health = Health.FAILED
    server.service.failure = EngineDiedError("killed")
    answer = http.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {
        "status": "failed", "ready": False, "in_flight": 0, "failure": "killed"
    }  # fmt: skip


def test_while_loading(server: Running, http: httpx.Client) -> None:
    server.service.health = Health.STARTING
    assert http.get("/health").status_code == 503
    answer = http.post("/completion", json={"prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_metrics(server: Running, http: httpx.Client) -> None:
    ENDPOINTS[0].ask(http, "q", True)
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert families["colibri_ready"].samples[0].value == 1
    assert families["colibri_rss_bytes"].samples[0].value == 123
    assert families["colibri_num_requests"].samples[0].value == 1
    assert families["colibri_engine_info"].samples[0].labels == {"lossy": "kv=int8"}
    paths = {s.labels["path"] for s in families["colibri_http_answers"].samples}
    assert ENDPOINTS[0].path in paths


def test_stats(server: Running, http: httpx.Client) -> None:
    told = http.get("/stats").json()
    assert told["engine"]["num_requests"] == 0
    assert told["model"] == "scripted"
    assert told["dialect"] == "json-tags"


def test_greeting(server: Running, http: httpx.Client) -> None:
    assert http.get("/").status_code == http.head("/").status_code == 200
