"""Dialects whose tool calls spell each argument between tags of its own."""

from __future__ import annotations

from functools import partial

from colibri.text.dialects.bodies import tagged_arguments
from colibri.text.dialects.bodies_other import braced_calls, nested_tags
from colibri.text.dialects.dialect import CallBody, CallSyntax, Dialect, Header

_DSML = "\uff5cDSML\uff5c"
_M3 = "]<]minimax[>["

_function_tags = tagged_arguments(
    r"<function=(?P<name>[^>\n]+)>",
    r"<parameter=(?P<key>[^>\n]+)>\n?",
    ("\n</parameter>", "</parameter>"),
    call_end="</function>",
)


def _function_calls(opening: str, closing: str) -> CallSyntax:
    return CallSyntax(
        opening=opening,
        closings=(closing,),
        body=_function_tags,
        written=f"{opening}\n<function=$name>\n$arguments</function>\n{closing}",
        argument="<parameter=$key>\n$value\n</parameter>\n",
    )


def _key_value_calls(suffix: str = "", name_end: str = "") -> CallSyntax:
    """A name, then keys and values by turns, each between tags of its own."""
    key, value = f"arg_key{suffix}", f"arg_value{suffix}"
    opening, closing = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    return CallSyntax(
        opening=opening,
        closings=(closing,),
        body=tagged_arguments(
            r"\s*(?P<name>[^\s<]+)\s*" + (f"(?:{name_end})?" if name_end else ""),
            rf"<{key}>(?P<key>.*?)</{key}>\s*<{value}>",
            (f"</{value}>",),
        ),
        written=f"{opening}$name{name_end}\n$arguments{closing}",
        argument=f"<{key}>$key</{key}>\n<{value}>$value</{value}>\n",
    )


def _dsml_calls(section: str) -> CallSyntax:
    tag = _DSML
    return CallSyntax(
        opening=f"<{tag}{section}>",
        closings=(f"</{tag}{section}>",),
        body=tagged_arguments(
            rf'<{tag}invoke name="(?P<name>[^"]*)">',
            rf'<{tag}parameter name="(?P<key>[^"]*)"(?: string="(?P<string>true|false)")?>',
            (f"</{tag}parameter>",),
            call_end=f"</{tag}invoke>",
        ),
        written=f'<{tag}{section}>\n<{tag}invoke name="$name">\n$arguments</{tag}invoke>\n'
        f"</{tag}{section}>",
        argument=f'<{tag}parameter name="$key" string="$string">$value</{tag}parameter>\n',
    )


FUNCTION_TAGS = _function_calls("<tool_call>", "</tool_call>")
KEY_VALUE_TAGS = _key_value_calls()

TAG_DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        name="xtml",
        signature=("'<|open|>'", "'<|close|>'", "open_tag('call'"),
        reasoning=(("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        calls=(
            CallSyntax(
                opening="<|open|>tools<|sep|>",
                closings=("<|close|>tools<|sep|>",),
                body=tagged_arguments(
                    r'<\|open\|>call tool="(?P<name>[^"]*)"[^<]*<\|sep\|>',
                    r'<\|open\|>argument key="(?P<key>[^"]*)"(?: type="(?P<type>[^"]*)")?<\|sep\|>',
                    ("<|close|>argument<|sep|>",),
                    call_end="<|close|>call<|sep|>",
                ),
                written='<|open|>tools<|sep|><|open|>call tool="$name" index="1"<|sep|>'
                "$arguments<|close|>call<|sep|><|close|>tools<|sep|>",
                argument='<|open|>argument key="$key" type="$type"<|sep|>$value'
                "<|close|>argument<|sep|>",
            ),
        ),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        answer="<|open|>response<|sep|>",
    ),
    Dialect(
        name="dsml",
        signature=(_DSML,),
        calls=(_dsml_calls("tool_calls"), _dsml_calls("function_calls")),
    ),
    Dialect(
        name="invoke-tags",
        signature=("<minimax:tool_call>", "<invoke"),
        calls=(
            CallSyntax(
                opening="<minimax:tool_call>",
                closings=("</minimax:tool_call>",),
                body=tagged_arguments(
                    r'<invoke name="(?P<name>[^"]*)">',
                    r'<parameter name="(?P<key>[^"]*)">\n?',
                    ("\n</parameter>", "</parameter>"),
                    call_end="</invoke>",
                ),
                written='<minimax:tool_call>\n<invoke name="$name">\n$arguments</invoke>\n'
                "</minimax:tool_call>",
                argument='<parameter name="$key">$value</parameter>\n',
            ),
        ),
    ),
    Dialect(
        name="nested-tags",
        signature=(_M3, "<invoke name="),
        reasoning=(("<mm:think>", "</mm:think>"),),
        calls=(
            CallSyntax(
                opening=f"{_M3}<tool_call>",
                closings=(f"{_M3}</tool_call>",),
                body=CallBody(partial(nested_tags, _M3)),
                written=f'{_M3}<tool_call>\n{_M3}<invoke name="$name">$arguments{_M3}</invoke>\n'
                f"{_M3}</tool_call>",
                argument=f"{_M3}<$key>$value{_M3}</$key>",
            ),
        ),
    ),
    Dialect(
        name="atem",
        signature=("<atem:function_calls>",),
        reasoning=(),
        header=Header(
            ("<|start|>",),
            "<|message|>",
            ("<|eom|>", "<|eot|>"),
            reasoning="to=self",
            thinks=" to=self<|message|>",
        ),
        answer=" to=user<|message|>",
        calls=(
            CallSyntax(
                opening="<atem:function_calls>",
                closings=("</atem:function_calls>",),
                body=tagged_arguments(
                    r'<atem:invoke name="(?P<name>[^"]*)">',
                    r'<atem:parameter name="(?P<key>[^"]*)">',
                    ("</atem:parameter>",),
                    call_end="</atem:invoke>",
                ),
                written=' to=$name<|message|><atem:function_calls>\n<atem:invoke name="$name">\n'
                "$arguments</atem:invoke>\n</atem:function_calls>",
                argument='<atem:parameter name="$key">$value</atem:parameter>\n',
            ),
        ),
    ),
    Dialect(
        name="seed-tags",
        signature=("<seed:tool_call>",),
        reasoning=(("<seed:think>", "</seed:think>"),),
        calls=(_function_calls("<seed:tool_call>", "</seed:tool_call>"),),
    ),
    Dialect(
        name="function-tags",
        signature=("<tool_call>", "<function=", "<parameter="),
        calls=(FUNCTION_TAGS,),
    ),
    Dialect(
        name="key-value-tags",
        signature=("<tool_call>", "<arg_key>"),
        calls=(KEY_VALUE_TAGS,),
    ),
    Dialect(
        name="suffixed-tags",
        signature=("'<tool_call{}>'.format(",),
        reasoning=(("<think:opensource>", "</think:opensource>"),),
        calls=(_key_value_calls(":opensource", "<tool_sep:opensource>"),),
        dropped=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    Dialect(
        name="attribute-tags",
        signature=('<function name="',),
        calls=(
            CallSyntax(
                opening='<function name="',
                closings=("</function>",),
                body=tagged_arguments(
                    r'<function name="(?P<name>[^"]*)">',
                    r'<param name="(?P<key>[^"]*)">(?:<!\[CDATA\[)?',
                    ("]]></param>", "</param>"),
                    ahead=len("<![CDATA["),
                ),
                written='<function name="$name">$arguments</function>',
                argument='<param name="$key">$value</param>',
                keeps_opening=True,
            ),
        ),
    ),
    Dialect(
        name="braced",
        signature=("<|tool_call>", "<tool_call|>"),
        reasoning=(("<|channel>thought\n", "<channel|>"),),
        calls=(
            CallSyntax(
                opening="<|tool_call>", closings=("<tool_call|>",), body=CallBody(braced_calls)
            ),
        ),
        dropped=("<|channel>final\n",),
    ),
)
