"""Dialects whose tool calls are JSON, or Python, between markers."""

from __future__ import annotations

from colibri.text.dialects.bodies import JSON_BODY, named_json
from colibri.text.dialects.bodies_other import python_calls
from colibri.text.dialects.dialect import CallBody, CallSyntax, Dialect, Header

_BAR = "\uff5c"

JSON_TAGS = CallSyntax(
    opening="<tool_call>",
    closings=("</tool_call>",),
    body=JSON_BODY,
    written='<tool_call>\n{"name": "$name", "arguments": $json}\n</tool_call>',
    quotes=True,
)


def _list_calls(opening: str, *closings: str, written: str | None = None) -> CallSyntax:
    """JSON calls, usually a list, after a marker; to the end where nothing closes them.

    `written` closes them itself where it is given.
    """
    spelled = f'{opening}[{{"name": "$name", "arguments": $json}}]' + "".join(closings[:1])
    return CallSyntax(
        opening=opening,
        closings=closings,
        body=JSON_BODY,
        written=written or spelled,
        quotes=True,
    )


_BARE_JSON = CallSyntax(
    opening="{",
    body=JSON_BODY,
    written='{"name": "$name", "parameters": $json}',
    at_start=True,
    keeps_opening=True,
)
_BARE_FUNCTION = CallSyntax(
    opening="<function=",
    closings=("</function>",),
    body=named_json(r"<function=(?P<name>[^>\n]+)>"),
    written="<function=$name>$json</function>",
    quotes=True,
    keeps_opening=True,
)

JSON_DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        name="harmony",
        signature=("<|channel|>", "<|message|>", "<|start|>"),
        reasoning=(),
        header=Header(
            ("<|start|>", "<|channel|>"),
            "<|message|>",
            ("<|end|>", "<|return|>", "<|call|>"),
            reasoning="analysis",
            thinks="<|channel|>analysis<|message|>",
            written="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>"
            "$json<|call|>",
        ),
        answer="<|channel|>final<|message|>",
    ),
    Dialect(
        name="recipient-lines",
        signature=(">>>${recipient}",),
        reasoning=(),
        header=Header(
            (">>>",),
            "\n",
            (),
            reasoning=None,
            written="$name\n$json",
            recipient=r"^(\S+)$",
            others=("all",),
        ),
        answer="all\n",
    ),
    Dialect(
        name="role-messages",
        signature=("'function call'", "<|role_sep|>", "<|message_sep|>"),
        reasoning=(),
        calls=(
            CallSyntax(
                opening="function call<|role_sep|>",
                closings=("<|message_sep|>",),
                body=JSON_BODY,
                written="<|message_sep|>\n\nfunction call<|role_sep|>\n"
                '{"name": "$name", "arguments": $json}<|message_sep|>',
                quotes=True,
            ),
        ),
        dropped=("<|message_sep|>",),
    ),
    Dialect(
        name="tool-sections",
        signature=(f"<{_BAR}tool▁call▁begin{_BAR}>",),
        calls=(
            CallSyntax(
                opening=f"<{_BAR}tool▁call▁begin{_BAR}>",
                closings=(f"<{_BAR}tool▁call▁end{_BAR}>",),
                body=named_json(
                    rf"(?:function<{_BAR}tool▁sep{_BAR}>)?(?P<name>[^\s<]+)"
                    rf"(?:<{_BAR}tool▁sep{_BAR}>|\s*```json)\s*",
                    r"\s*(?:```)?",
                ),
                written=f"<{_BAR}tool▁calls▁begin{_BAR}><{_BAR}tool▁call▁begin{_BAR}>$name"
                f"<{_BAR}tool▁sep{_BAR}>$json<{_BAR}tool▁call▁end{_BAR}>"
                f"<{_BAR}tool▁calls▁end{_BAR}>",
                quotes=True,
            ),
        ),
        dropped=(f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"),
    ),
    Dialect(
        name="pipe-sections",
        signature=("<|tool_calls_section_begin|>",),
        calls=(
            CallSyntax(
                opening="<|tool_call_begin|>",
                closings=("<|tool_call_end|>",),
                body=named_json(
                    r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
                    r"<\|tool_call_argument_begin\|>"
                ),
                written="<|tool_calls_section_begin|><|tool_call_begin|>functions.$name:0"
                "<|tool_call_argument_begin|>$json<|tool_call_end|><|tool_calls_section_end|>",
                quotes=True,
            ),
        ),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Dialect(
        name="bracket-arguments",
        signature=("[TOOL_CALLS]", "[ARGS]"),
        reasoning=(("[THINK]", "[/THINK]"),),
        calls=(
            CallSyntax(
                opening="[TOOL_CALLS]",
                closings=("[/TOOL_CALLS]", "[TOOL_CALLS]"),
                body=named_json(
                    r"(?P<name>[^\s\[\]{]+)(?:\[CALL_ID\](?P<id>[^\[]*))?(?:\[ARGS\])?(?=\{)"
                ),
                written="[TOOL_CALLS]$name[ARGS]$json",
                quotes=True,
            ),
        ),
        short_ids=True,
    ),
    Dialect(
        name="bracket-list",
        signature=("[TOOL_CALLS]",),
        calls=(_list_calls("[TOOL_CALLS]"),),
        short_ids=True,
    ),
    Dialect(
        name="python-list",
        signature=("<|tool_call_start|>",),
        calls=(
            CallSyntax(
                opening="<|tool_call_start|>",
                closings=("<|tool_call_end|>",),
                body=CallBody(python_calls),
                written="<|tool_call_start|>[$name($arguments)]<|tool_call_end|>",
                argument="$key=$value",
                separator=", ",
            ),
        ),
    ),
    Dialect(
        name="actions",
        signature=("<|START_ACTION|>",),
        reasoning=(("<|START_THINKING|>", "<|END_THINKING|>"),),
        calls=(
            _list_calls(
                "<|START_ACTION|>",
                "<|END_ACTION|>",
                written='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "$name", '
                '"parameters": $json}]<|END_ACTION|>',
            ),
        ),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Dialect(
        name="named-pipes",
        signature=("<|tool_call:begin|>",),
        reasoning=(("<|think|>", "<|end|>"),),
        calls=(
            CallSyntax(
                opening="<|tool_call:begin|>",
                closings=("<|tool_call:end|>",),
                body=named_json(
                    r"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>"
                ),
                written="<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>$name"
                "<|tool_call:args|>$json<|tool_call:end|>",
                quotes=True,
            ),
        ),
        dropped=("<|begin|>assistant", "<|content|>", "<|tool_calls|>", "<|end|>"),
        answer="<|content|>",
    ),
    Dialect(
        name="action-fence",
        signature=("<|START_OF_TURN_TOKEN|>", "Action:\\n```json"),
        reasoning=(),
        calls=(
            CallSyntax(
                opening="Action:\n```json\n",
                closings=("```",),
                body=JSON_BODY,
                written='Action:\n```json\n[{"tool_name": "$name", "parameters": $json}]```',
                quotes=True,
            ),
        ),
    ),
    Dialect(
        name="keyed-list",
        signature=("<|tools_prefix|>",),
        reasoning=(("<|inner_prefix|>", "<|inner_suffix|>"),),
        calls=(
            _list_calls(
                "<|tools_prefix|>",
                "<|tools_suffix|>",
                written='<|tools_prefix|>[{"$name": $json}]<|tools_suffix|>',
            ),
        ),
    ),
    Dialect(
        name="final-marker",
        signature=("[BEGIN FINAL RESPONSE]", "<tool_calls>"),
        reasoning=(("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),),
        calls=(_list_calls("<tool_calls>", "</tool_calls>"),),
        dropped=("[END FINAL RESPONSE]",),
    ),
    Dialect(
        name="tool-calls-tags",
        signature=("<tool_calls>",),
        calls=(_list_calls("<tool_calls>", "</tool_calls>"),),
    ),
    Dialect(
        name="toolcall-tags",
        signature=("<TOOLCALL>",),
        calls=(_list_calls("<TOOLCALL>", "</TOOLCALL>"),),
    ),
    Dialect(name="json-tags", signature=("<tool_call>",), calls=(JSON_TAGS,)),
    Dialect(
        name="pipe-list",
        signature=("<|tool_call|>",),
        calls=(_list_calls("<|tool_call|>"),),
        dropped=("<response>", "</response>"),
    ),
    Dialect(
        name="pipe-json",
        signature=("<|function_call|>",),
        calls=(
            _list_calls(
                "<|function_call|>",
                "<|message_sep|>",
                "<|function_call|>",
                written='<|function_call|>{"name": "$name", "arguments": $json}',
            ),
        ),
        dropped=("<|message_sep|>",),
    ),
    Dialect(
        name="function-json",
        signature=("<function=", "</function>"),
        calls=(_BARE_FUNCTION, _list_calls("<|python_tag|>")),
    ),
    Dialect(name="functools", signature=("functools[",), calls=(_list_calls("functools"),)),
    Dialect(
        name="bare-json",
        signature=('{"name": function name, "parameters"',),
        calls=(_BARE_JSON, _list_calls("<|python_tag|>")),
    ),
)
