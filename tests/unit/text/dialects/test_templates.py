"""What published templates write for an assistant's tool call is read back as that call."""

import json
from pathlib import Path

import pytest

from colibri.errors import TextError
from colibri.text import ChatTemplate
from colibri.text.dialects import DIALECTS, Dialect, find_dialect
from tests.unit.text.dialects.replies import parsed
from tests.unit.text.samples import SHARED

TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja"))
# Templates that show no tool calls, or only what they want from others.
SILENT = {
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
# Templates that fail in themselves.
FAILING = {
    "fireworks-ai-llama-3-firefunction-v2", "llama-cpp-deepseek-r1",
}  # fmt: skip
ENDS = ("</s>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>")
ARGUMENTS = {"city": "Pàris <b>", "days": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "c"},
        "days": {"type": "integer", "description": "n"},
    },
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "d", "parameters": SCHEMA}


def rendered(template: ChatTemplate) -> str:
    """What a template writes for a question and its answer, which is a call."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "Q?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        tools = [{"type": "function", "function": FUNCTION}]
        try:
            text = template.render(messages, tools=tools, add_generation_prompt=False)
            return text[text.index("Q?") + 2 :]
        except TextError as error:
            failure = error
    raise failure


def reply_of(text: str, dialect: Dialect) -> str:
    """From the first marker on."""
    found = [at for marker in dialect.markers if (at := text.find(marker)) >= 0]
    text = text[min(found, default=0) :]
    for end in ENDS:
        text = text.removesuffix(end)
    return text


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_of_templates(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    dialect = find_dialect([source])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate({"default": source}, special)
    if path.stem in FAILING:
        with pytest.raises(TextError):
            rendered(template)
        return
    text = reply_of(rendered(template), dialect)
    calls = parsed(dialect, list(text), tools={"get_weather": SCHEMA})[2]
    expected = [] if path.stem in SILENT else [("get_weather", ARGUMENTS)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected


def test_names_of_dialects_choose_where_no_template_does() -> None:
    assert find_dialect([], "harmony").name == "harmony"
    assert find_dialect(["plain"]).name == "generic"
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)
    with pytest.raises(TextError, match="no-such"):
        find_dialect([], "no-such")
