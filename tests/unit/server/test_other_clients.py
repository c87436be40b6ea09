"""Clients that take seconds to import: `make clients` installs and runs them (`-m slow`)."""

import subprocess
import sys
from typing import Any

import pytest

from tests.unit.server.scripted import Running

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", model="scripted", max_retries=0)


def weather(city: str) -> str:
    "Says what the weather is."
    return city


assert model.invoke("q").content == "hi 🦜"
assert "".join(chunk.content for chunk in model.stream("q")) == "hi 🦜"
call = model.bind_tools([weather]).invoke("q").tool_calls[0]
assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"}), call
"""
LITELLM = """
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

ask = {"messages": [{"role": "user", "content": "q"}], "api_key": "none"}
openai = {"model": "openai/scripted", "api_base": sys.argv[1] + "/v1", **ask}
assert litellm.completion(**openai).choices[0].message.content == "hi 🦜"
parts = litellm.completion(**openai, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in parts) == "hi 🦜"
function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
reply = litellm.completion(**openai, tools=[{"type": "function", "function": function}])
assert reply.choices[0].message.tool_calls[0].function.name == "weather"
assert reply.choices[0].finish_reason == "tool_calls"
try:
    litellm.completion(**{**openai, "model": "openai/other"}, num_retries=0)
except litellm.NotFoundError as error:
    assert "scripted" in str(error)
else:
    raise AssertionError("another model was served")
"""


@pytest.mark.parametrize("script", [LANGCHAIN, LITELLM], ids=["langchain", "litellm"])
def test_scripts(server: Running, script: str) -> None:
    replies: list[Any] = ["hi 🦜", "hi 🦜", CALL]
    server.service.replies = replies
    result = subprocess.run(
        [sys.executable, "-c", script, server.url], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
