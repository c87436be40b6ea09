"""`coli serve` as a process of its own, over the model that comes along."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from colibri.errors import SettingsError
from colibri.server.opening import binding_of, check_exposure, is_loopback, limits_of
from colibri.settings import Settings
from tests.unit.server.served import COMMAND, Served, children


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = tmp_path_factory.mktemp("cache")
    made = Served("--served-name", "demo", "--cache-dir", str(cache), "--context-length", "256")
    made.wait_for("demo is ready")
    yield made
    assert made.stop(signal.SIGINT) == 0
    assert made.said.endswith("coli: stopped\n")


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as client:
        yield client


def test_completions(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = http.post("/v1/completions", json=body).json()
    assert whole["model"] == "demo"
    assert whole["usage"]["completion_tokens"] == 8
    streamed = http.post("/v1/completions", json={**body, "stream": True}).text
    parts = [json.loads(part[6:]) for part in streamed.split("\n\n") if part[6:7] == "{"]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == whole["choices"][0]["text"] != ""


def test_stop_strings_stop_the_engine(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    text = http.post("/completion", json=body).json()["text"]
    stop = text[3:8]
    answer = http.post("/completion", json={**body, "stop": stop}).json()
    assert answer["text"] == text[: text.index(stop)]
    assert (answer["finish_reason"], answer["stop"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) < 30


def test_formats_are_enforced(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    answer = http.post("/completion", json={"prompt": "x", "json_schema": schema}).json()
    assert json.loads(answer["text"])["ok"] in ("yes", "no")


def test_several_replies_and_logprobs(http: httpx.Client) -> None:
    body = {"prompt": "Once", "n": 3, "logprobs": 2, "max_tokens": 3, "seed": 1, "temperature": 1}
    one, two = (http.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert one == two
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in one] == [3, 3, 3]


def test_a_model_without_a_chat_template_says_so(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "q"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def test_what_it_tells_of_itself(http: httpx.Client) -> None:
    assert http.get("/health").json()["ready"]
    told = http.get("/stats").json()
    assert told["engine"]["completion_tokens"] > 0
    assert told["engine"]["ram_budget_bytes"] >= told["engine"]["rss_bytes"]
    assert "colibri_experts_hits_total" in http.get("/metrics").text


def test_an_engine_that_dies_is_started_again(http: httpx.Client, served: Served) -> None:
    pids = children(served.process.pid)
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    body = {"prompt": "Once", "max_tokens": 2}
    statuses = {http.post("/completion", json=body).status_code}
    while 200 not in statuses:
        statuses.add(http.post("/completion", json=body).status_code)
    assert statuses <= {200, 503}
    assert "tool calls" not in served.said  # the model has no template that offers any
    assert http.get("/stats").json()["dialect"] is None
    served.wait_for(r"the engine is lost \(.* SIGKILL.*\) and is started again")
    served.wait_for("the engine is ready again")


def test_the_engine_does_not_hear_ctrl_c(served: Served) -> None:
    for pid in children(served.process.pid):
        assert os.getsid(pid) == pid


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--port", "{taken}"),
            r"error: --port \d+ of 127.0.0.1 .* in use\): set --port to another",
        ),
        (
            ("--host", "192.0.2.1", "--api-key", "k"),
            r"error: --host 192.0.2.1 .*: set --host to one",
        ),
        (("--host", "a" * 70, "--api-key", "k"), r"error: --host a+ is no address of this machine"),
    ],
)
def test_an_address_that_cannot_be_bound(
    served: Served, flags: tuple[str, ...], reason: str
) -> None:
    taken = served.url.rpartition(":")[2]
    result = subprocess.run(
        [*COMMAND, *(flag.format(taken=taken) for flag in flags)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2
    assert re.search(reason, result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr
    assert "ERROR" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_stopped_while_it_loads(tmp_path: Path, number: int) -> None:
    served = Served("--cache-dir", str(tmp_path))
    assert served.stop(number) == 0
    assert served.said.endswith("coli: stopped\n")
    assert "error" not in served.said


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 3
    assert "config.json" in result.stderr


def test_a_budget_that_is_too_small_ends_the_server(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "--ram", "20MB", "--cache-dir", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 4
    assert "raise --ram to at least" in result.stderr


def test_listening_to_strangers_needs_a_key_or_a_word() -> None:
    with pytest.raises(SettingsError, match="api_key"):
        check_exposure(Settings(host="0.0.0.0"))
    for settings in (
        Settings(),
        Settings(host="::1"),
        Settings(host="0.0.0.0", api_key="k"),
        Settings(host="10.0.0.1", expose=True),
    ):
        check_exposure(settings)


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        (Settings(), ("localhost", "127.0.0.1", "::1")),
        (Settings(allowed_host=("Me.local",)), ("localhost", "127.0.0.1", "::1", "me.local")),
        (Settings(allowed_host=("*",)), ()),
        (Settings(host="0.0.0.0", api_key="k"), ()),
        (
            Settings(host="0.0.0.0", api_key="k", allowed_host=("a",)),
            ("localhost", "127.0.0.1", "::1", "a"),
        ),
    ],
)
def test_allowed_hosts(settings: Settings, hosts: tuple[str, ...]) -> None:
    assert limits_of(settings).allowed_hosts == hosts


def test_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.9", "localhost", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "example.org")] == [False] * 3
    assert binding_of(Settings(port=0, host="::1")).port == 0
