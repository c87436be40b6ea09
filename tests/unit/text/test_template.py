import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from colibri.errors import TextError
from colibri.text import ChatTemplate
from tests.unit.text.samples import CHATML, CHATS, SHARED, checkpoint, golden

PUBLISHED = {path.name: path.read_text() for path in (SHARED / "chat_templates").glob("*.jinja")}
SYSTEM_AND_USER = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    }
]
# What these say about a chat with a system message or without tools is theirs to say.
REFUSALS = {
    "google-gemma-2-2b-it.jinja": "System role not supported",
    "fireworks-ai-llama-3-firefunction-v2.jinja": "'functions' is undefined",
}


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}).render(SYSTEM_AND_USER, **variables)


@pytest.mark.parametrize("name", CHATS)
def test_renders_like_transformers(name: str) -> None:
    template = ChatTemplate.load(checkpoint(name))
    assert template is not None
    for case in golden(name, "chat"):
        variables = {k: v for k, v in case.items() if k not in ("name", "text", "messages")}
        date = "".join(case["text"].partition("Current date: ")[2][:10])
        if date:
            fixed: Callable[[], datetime] = lambda date=date: datetime.fromisoformat(date)  # noqa: E731
            template = ChatTemplate(template.sources, now=fixed)
        assert template.render(case["messages"], **variables) == case["text"], case["name"]


@pytest.mark.parametrize("name", ["chatml", *sorted(PUBLISHED)])
def test_published_templates_render_a_simple_chat(name: str) -> None:
    source = CHATML if name == "chatml" else PUBLISHED[name]
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    if name in REFUSALS:
        with pytest.raises(TextError, match=REFUSALS[name]):
            template.render(SYSTEM_AND_USER)
        return
    text = template.render(SYSTEM_AND_USER, tools=TOOLS if "tool_use" in name else None)
    assert "Hi" in text
    if name == "llama-cpp-deepseek-r1.jinja":
        with pytest.raises(TextError, match="generator is not JSON serializable"):
            template.render(SYSTEM_AND_USER, tools=TOOLS)
        return
    assert "Hi" in template.render(SYSTEM_AND_USER, tools=TOOLS)


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TextError, match="refuses the conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages + 1 }}",
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages|tojson(indent=messages) }}",
    ],
)
def test_failures_and_escapes_are_typed(source: str) -> None:
    with pytest.raises(TextError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a }}", "{% unknown_tag %}", "{% generation %}"]
)
def test_invalid_jinja_is_refused_when_loaded(source: str) -> None:
    with pytest.raises(TextError, match=r"chat template \(default\) is no valid jinja \(line 1\)"):
        ChatTemplate({"default": source})


def test_what_hugging_face_offers_to_templates() -> None:
    day = datetime(2024, 2, 29)
    dated = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, now=lambda: day)
    assert dated.render([]) == "29 Feb 2024"
    assert render("{{ {'b': '<é>', 'a': 1}|tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, indent=1) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert render("{{ ['é']|tojson(ensure_ascii=true, separators=(',', ':')) }}") == '["\\u00e9"]'
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}") == "Hi"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{{ tools is none }} {{ documents is none }} {{ bos_token }}") == "True True "
    assert render("{{ enable_thinking }}{{ bos_token }}", enable_thinking=False, bos_token="b") == (
        "Falseb"
    )


def write(directory: Path, name: str, value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(text)


def loaded(directory: Path) -> ChatTemplate:
    template = ChatTemplate.load(directory)
    assert template is not None
    return template


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<s>"}})
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "chat_template": "{{bos_token}}"})
    assert loaded(tmp_path).render([]) == "<s>"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert loaded(tmp_path).render([]) == "json"
    write(tmp_path, "chat_template.jinja", "file {{ bos_token }}")
    assert loaded(tmp_path).render([]) == "file <s>"
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
    assert loaded(tmp_path).render([], tools=[{"name": "f"}]) == "tools"
    assert loaded(tmp_path).render([], tools=[]) == "file <s>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert loaded(tmp_path).render([]) == "d"
    assert loaded(tmp_path).render([], tools=[{"name": "f"}]) == "t"
    write(tmp_path, "tokenizer_config.json", {"chat_template": named[1:]})
    with pytest.raises(TextError, match="no template 'default', only"):
        loaded(tmp_path).render([])


@pytest.mark.parametrize("value", [5, [5], [{"name": "a"}], {"default": 5}, [[]]])
def test_malformed_chat_template_key(tmp_path: Path, value: object) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(TextError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_what_templates_change_is_theirs() -> None:
    source = "{{ messages.append(1) }}{{ messages[0].parts.append(2) }}{{ messages|length }}"
    template = ChatTemplate({"default": source})
    messages = [{"role": "user", "parts": []}]
    assert template.render(messages) == "NoneNone2"
    assert messages == [{"role": "user", "parts": []}]
