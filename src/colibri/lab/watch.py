"""What a running server does, from two looks at its `/stats`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from colibri.errors import RequestError

_WAIT_S = 5.0


class Watched:
    """A server that is asked again and again."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is its address, with or without `http://` and `/v1`.

        Raises:
            RequestError: it is no address.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"{url}: it must be an address such as http://127.0.0.1:8080")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.host = parts.netloc
        self._path = f"{parts.path.rstrip('/').removesuffix('/v1')}/stats"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def look(self) -> dict[str, Any]:
        """What `/stats` says.

        Raises:
            RequestError: nobody answers, the key is refused, or it is no server of Colibri.
        """
        with closing(self._kind(self.host, timeout=_WAIT_S)) as connection:
            try:
                connection.request("GET", self._path, headers=self._headers)
                response = connection.getresponse()
                body = response.read(1 << 22)
            except (OSError, HTTPException) as error:
                raise RequestError(
                    f"{self.host}: nobody answers ({error}): start a server with `coli serve`, or "
                    "name its address"
                ) from None
        if response.status in (401, 403):
            raise RequestError(f"{self.host}: refuses the key: give the server's (--api-key)")
        try:
            told = json.loads(body)
        except ValueError:
            told = None
        if response.status != 200 or not isinstance(told, dict) or "health" not in told:
            raise RequestError(f"{self.host}: answers, but is no server of Colibri")
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What happened between two looks; rates are None where nothing did.

    Attributes:
        model: its name.
        health: `ready`, or what is wrong.
        decode_tokens_per_s: of all replies together.
        prompt_tokens_per_s: tokens of prompts that were read, reused ones aside.
        hit_rate: of experts.
        recall: of predictions.
        disk_bytes_per_s: that were read.
        wasted_bytes_per_s: that were read ahead for nothing.
        num_running: replies being computed.
        num_waiting: requests that wait.
        num_prefixes: conversations kept.
        kv_share: of the blocks of keys and values that hold something.
        rss_bytes: of engine and server together.
        budget_bytes: what they may have.
        disconnects: clients that left early, since the start.
        refused: answers of 400 and above, since the start.
        lossy: settings that cost accuracy.
    """

    model: str
    health: str
    decode_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    hit_rate: float | None
    recall: float | None
    disk_bytes_per_s: float
    wasted_bytes_per_s: float
    num_running: int
    num_waiting: int
    num_prefixes: int
    kv_share: float
    rss_bytes: int
    budget_bytes: int
    disconnects: int
    refused: int
    lossy: tuple[str, ...]

    @classmethod
    def between(cls, before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> Sight:
        """From two answers of `/stats`, the later one `seconds` after the other.

        A server that was started anew meanwhile is seen from its start.
        """
        engine, server = now["engine"] or {}, now["server"]
        old = before["engine"] or {}
        if old.get("num_requests", 0) > engine.get("num_requests", 0):
            old = {}
        new_experts, old_experts = engine.get("experts", {}), old.get("experts", {})

        def grown(name: str) -> float:
            return float(engine.get(name, 0) - old.get(name, 0))

        def experts(name: str) -> float:
            return float(new_experts.get(name, 0) - old_experts.get(name, 0))

        blocks = engine.get("kv_blocks", 0)
        read = experts("bytes_read") + experts("slack_bytes") + experts("abandoned_bytes")
        answers = server["answers"]
        return cls(
            model=str(now["model"]),
            health=str(now["health"]),
            decode_tokens_per_s=_rate(grown("completion_tokens"), seconds),
            prompt_tokens_per_s=_rate(grown("prompt_tokens") - grown("reused_tokens"), seconds),
            hit_rate=_rate(experts("hits"), experts("requests")),
            recall=_rate(experts("foreseen"), experts("wanted")),
            disk_bytes_per_s=(read + experts("table_bytes")) / seconds,
            wasted_bytes_per_s=experts("ahead_wasted_bytes") / seconds,
            num_running=engine.get("num_running", 0),
            num_waiting=engine.get("num_waiting", 0),
            num_prefixes=engine.get("num_prefixes", 0),
            kv_share=1 - engine.get("kv_free_blocks", 0) / blocks if blocks else 0.0,
            rss_bytes=engine.get("rss_bytes", 0) + server["rss_bytes"],
            budget_bytes=engine.get("ram_budget_bytes", 0),
            disconnects=server["disconnects"],
            refused=sum(each["count"] for each in answers if each["status"] >= 400),
            lossy=tuple(engine.get("lossy", ())),
        )


def _rate(amount: float, by: float) -> float | None:
    return amount / by if amount > 0 and by > 0 else None
