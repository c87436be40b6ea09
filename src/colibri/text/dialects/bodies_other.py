"""Tool calls that are spelled neither in JSON nor with one tag an argument."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from colibri.text.dialects.bodies import made_call, typed_value
from colibri.text.dialects.dialect import Tools
from colibri.text.dialects.events import ToolCall

_QUOTE = '<|"|>'
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_WORD = re.compile(r"[^,\]}]*")
_BRACED = re.compile(r"\s*call:([^\s{]+)\s*")
_INVOKE = re.compile(r'<invoke name="(?P<name>[^"]*)">(?P<body>.*?)</invoke>', re.DOTALL)
_TAG = re.compile(r"\s*<([^<>/\s]+)>")


def python_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`[f(a=1, b='x'), g()]`: Python calls with literal keyword arguments."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords only")
    values = {word.arg: _literal(word.value) for word in node.keywords if word.arg is not None}
    if len(values) != len(node.keywords):
        raise ValueError("a keyword is repeated, or has no name")
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return ToolCall(ast.unparse(node.func), text)


def _literal(node: ast.expr) -> Any:
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    return ast.literal_eval(node)


def braced_calls(body: str, tools: Tools) -> list[ToolCall] | None:
    """`call:f{a:1,b:<|"|>x<|"|>}`: unquoted keys, texts between markers."""
    match = _BRACED.match(body)
    if match is None:
        return None
    try:
        value, end = _braced_value(body, match.end())
    except (ValueError, RecursionError, IndexError):
        return None
    call = None if body[end:].strip() else made_call(match[1], value)
    return None if call is None else [call]


def _braced_value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    while text[at].isspace():
        at += 1
    if text.startswith(_QUOTE, at):
        start = at + len(_QUOTE)
        end = text.index(_QUOTE, start)
        return text[start:end], end + len(_QUOTE)
    if text[at] in "{[":
        return _braced_items(text, at)
    word = _WORD.match(text, at)
    written = word[0].strip() if word else ""
    return json.loads(written), at + len(word[0] if word else "")


def _braced_items(text: str, at: int) -> tuple[Any, int]:
    closing = "}" if text[at] == "{" else "]"
    keys: list[str] = []
    values: list[Any] = []
    at += 1
    while not text[at:].lstrip().startswith(closing):
        if closing == "}":
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("no key")
            keys.append(key[1].strip('"'))
            at = key.end()
        value, at = _braced_value(text, at)
        values.append(value)
        rest = text[at:].lstrip()
        if not rest.startswith((",", closing)):
            raise ValueError("no comma")
        at = len(text) - len(rest) + rest.startswith(",")
    end = text.index(closing, at) + 1
    return (dict(zip(keys, values, strict=True)) if closing == "}" else values), end


def nested_tags(mark: str, body: str, tools: Tools) -> list[ToolCall] | None:
    """`<invoke name="f"><a>1</a><b><item>x</item></b></invoke>`, every tag after a mark."""
    text = body.replace(mark, "")
    found: list[ToolCall] = []
    for match in _INVOKE.finditer(text):
        schema = tools.get(match["name"], {})
        try:
            value = _tagged(match["body"], schema)
        except (ValueError, RecursionError):
            return None
        call = made_call(match["name"], {} if value == "" else value)
        if call is None:
            return None
        found.append(call)
    return found if not _INVOKE.sub("", text).strip() and found else None


def _tagged(text: str, schema: Any) -> Any:
    """An object of tags, a list of `item`s, or a value."""
    schema = schema if isinstance(schema, dict) else {}
    if _TAG.match(text) is None:
        return typed_value(text, schema) if schema else typed_value(text, {})
    properties, items = schema.get("properties", {}), schema.get("items", {})
    values: dict[str, Any] = {}
    listed: list[Any] = []
    while match := _TAG.match(text):
        key, closing = match[1], f"</{match[1]}>"
        end = text.index(closing, match.end())
        inner = text[match.end() : end]
        if key == "item" and "item" not in properties:
            listed.append(_tagged(inner, items))
        else:
            values[key] = _tagged(inner, properties.get(key, {}))
        text = text[end + len(closing) :]
    if text.strip() or (listed and values):
        raise ValueError("text beside tags")
    return listed or values
