"""The server's own description."""

import json
import re

import httpx

from colibri.server.app import PATHS
from tests.unit.server.scripted import Running


def test_every_path_is_described(server: Running, http: httpx.Client) -> None:
    told = http.get("/openapi.json").json()
    described = {(m.upper(), path) for path, item in told["paths"].items() for m in item}
    assert described == {(path.method, path.template) for path in PATHS}
    assert all(op["summary"] for item in told["paths"].values() for op in item.values())


def test_references_lead_somewhere(server: Running, http: httpx.Client) -> None:
    told = http.get("/openapi.json").json()
    known = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    used = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(told)))
    assert used <= known
    body = told["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "response_format" in told["components"]["schemas"][name]["properties"]
