"""Clients that take seconds to import: `make clients` installs and runs them (`-m slow`)."""

import subprocess
import sys

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
LLM = """
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["LLM_USER_PATH"] = folder = tempfile.mkdtemp()
model = {"model_id": "colibri", "model_name": "scripted", "api_base": sys.argv[1] + "/v1"}
model |= {"supports_schema": True, "supports_tools": True}
Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))  # which is YAML too


def llm(*arguments):
    command = [sys.executable, "-m", "llm", "-m", "colibri", "--key", "none", *arguments, "q"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


assert llm() == "hi 🦜"
assert llm("--no-stream") == "hi 🦜"
assert list(json.loads(llm("--schema", "name str"))) == ["name"]
"""
HUGGING_FACE = """
import sys
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=sys.argv[1] + "/v1", api_key="none")
ask = [{"role": "user", "content": "q"}]
assert client.chat_completion(ask, model="scripted").choices[0].message.content == "hi 🦜"
parts = client.chat_completion(ask, model="scripted", stream=True)
assert "".join(part.choices[0].delta.content or "" for part in parts) == "hi 🦜"
schema = {"type": "object", "properties": {}}
function = {"name": "weather", "description": "d", "parameters": schema}
reply = client.chat_completion(
    ask, model="scripted", tools=[{"type": "function", "function": function}]
)
assert reply.choices[0].message.tool_calls[0].function.name == "weather"
"""


@pytest.mark.parametrize(
    ("script", "last"),
    [(LANGCHAIN, CALL), (LITELLM, CALL), (LLM, '{"name": "x"}'), (HUGGING_FACE, CALL)],
    ids=["langchain", "litellm", "llm", "hugging-face"],
)
def test_scripts(server: Running, script: str, last: str) -> None:
    server.service.replies = ["hi 🦜", "hi 🦜", last]
    result = subprocess.run(
        [sys.executable, "-c", script, server.url], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
