"""The forms in which families of models write reasoning and tool calls, and the choice of those of a model.

Each is a part of a `response_template` of transformers: its fields say where a text begins and ends. The bodies of
calls are read by `calls`, because transformers raises an error where one is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from . import calls
from .call_end import Names, Values
from .calls import Item, Schemas

NONE = "none"
MISTRAL_ID_CHARS = 9  # of a whole id: its templates refuse others
CALL, REASONING, CONTENT = "call", "reasoning", "content"  # the names of fields
Read = Callable[[str, str, Schemas], list[Item]]  # of a body, and of all text with its markers

_HARMONY_ENDS = ["<|end|>", "<|return|>", "<|call|>"]
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_HARMONY_TO = r"to=functions\.(?P<name>[\w.-]{1,128})"
_HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_HARMONY_TEXTS = {
    "final": {
        "open_pattern": rf"{_HARMONY_START}<\|channel\|>final(?: ?<\|constrain\|>\w{{1,16}})?<\|message\|>",
        "close": _HARMONY_ENDS,
    },
    "preamble": {"open_pattern": rf"{_HARMONY_START}<\|channel\|>commentary<\|message\|>", "close": _HARMONY_ENDS},
}


@dataclass(frozen=True)
class ToolFormat:
    """The form of a family's tool calls."""

    name: str
    aliases: tuple[str, ...]  # names that SGLang and vLLM give it
    call: Mapping[str, Any]  # the field of a response_template
    read: Read | None  # None: the opening marker holds the name, and the body is the arguments
    markers: tuple[str, ...]  # texts that may be special tokens
    texts: Mapping[str, Any] = field(default_factory=dict)  # further fields, whose bodies are content
    num_id_chars: int = 24  # of a call's id, after "call_"
    values: Values | None = None  # None: no marker ends a call, or none that a value may hold


@dataclass(frozen=True)
class ReasoningFormat:
    """The form of a family's reasoning."""

    name: str
    aliases: tuple[str, ...]
    reasoning: Mapping[str, Any]
    markers: tuple[str, ...]
    opens: str = ""  # the marker that a template may write itself; "": it writes none
    closes: str = ""
    begins_inside: bool = False  # every answer begins with reasoning, whether a marker opens it or not
    texts: Mapping[str, Any] = field(default_factory=dict)


_TOOL_CALL = {"open": "<tool_call>", "close": "</tool_call>"}
_DEEPSEEK = {"open": "<｜tool▁calls▁begin｜>", "close": "<｜tool▁calls▁end｜>"}
_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_VALUES = Values('"', '"', ("<｜tool▁calls▁end｜>",))
_CALL_ENDS = ("</tool_call>",)
_QWEN_NAMES = Names(re.compile(r"<function=([^>]*)>"), re.compile(r"<parameter=([^>]*)>\Z"), closes=">")
_GLM_NAMES = Names(re.compile(r"\A([^<]*)"), re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>\Z"))

TOOL_FORMATS = (
    ToolFormat(
        "hermes", ("qwen", "qwen25"), _TOOL_CALL, calls.read_json, ("<tool_call>", "</tool_call>"),
        values=Values('"', '"', _CALL_ENDS),
    ),
    ToolFormat(
        "qwen3_coder", ("qwen3_xml", "qwen3_5"), _TOOL_CALL, calls.read_qwen_xml, ("<tool_call>", "</tool_call>"),
        values=Values("<parameter=", "</parameter>", _CALL_ENDS, _QWEN_NAMES),
    ),
    ToolFormat(
        "llama3_json", ("llama3", "llama4_json"),
        {"open_pattern": r'<\|python_tag\|>|\{\s{0,4}"(?:name|type)"\s{0,4}:'}, calls.read_llama, ("<|python_tag|>",),
    ),
    ToolFormat(
        "mistral", (), {"open": "[TOOL_CALLS]"}, calls.read_mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        num_id_chars=MISTRAL_ID_CHARS,
    ),
    ToolFormat(
        "deepseek_v3", ("deepseekv3", "deepseek_r1"), _DEEPSEEK, calls.read_deepseek, _DEEPSEEK_MARKERS,
        values=_DEEPSEEK_VALUES,
    ),
    ToolFormat(
        "deepseek_v31", ("deepseekv31",), _DEEPSEEK, calls.read_deepseek, _DEEPSEEK_MARKERS, values=_DEEPSEEK_VALUES
    ),
    ToolFormat(
        "glm45", ("glm47", "glm"), _TOOL_CALL, calls.read_glm, ("<tool_call>", "</tool_call>", *_ARGUMENTS),
        values=Values("<arg_value>", "</arg_value>", _CALL_ENDS, _GLM_NAMES),
    ),
    ToolFormat(
        "gpt-oss", ("openai", "harmony"),
        {
            "open_pattern": rf"{_HARMONY_START}(?: ?{_HARMONY_TO} ?<\|channel\|>(?:commentary|analysis)"
            rf"|<\|channel\|>(?:commentary|analysis) ?{_HARMONY_TO})[ \w]{{0,16}}"
            r"(?:<\|constrain\|>\w{1,16})?<\|message\|>",
            "close": _HARMONY_ENDS,
        },
        None, _HARMONY_MARKERS, _HARMONY_TEXTS, values=Values('"', '"', tuple(_HARMONY_ENDS)),
    ),
)  # fmt: skip
_THINK = {"open": "<think>", "close": "</think>"}
_THINK_MARKERS = ("<think>", "</think>")
REASONING_FORMATS = (
    ReasoningFormat("qwen3", ("think", "glm45", "deepseek_v3"), _THINK, _THINK_MARKERS, *_THINK_MARKERS),
    ReasoningFormat(
        "deepseek_r1", ("deepseek-r1", "qwen3-thinking"), _THINK, _THINK_MARKERS, *_THINK_MARKERS, begins_inside=True
    ),
    ReasoningFormat(
        "mistral", (), {"open": "[THINK]", "close": "[/THINK]"}, ("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]"
    ),
    ReasoningFormat(
        "gpt-oss", ("openai_gptoss", "harmony"),
        {"open_pattern": rf"{_HARMONY_START}<\|channel\|>analysis<\|message\|>", "close": _HARMONY_ENDS},
        _HARMONY_MARKERS, texts=_HARMONY_TEXTS,
    ),
)  # fmt: skip
_TOOLS_BY_NAME = {name: one for one in TOOL_FORMATS for name in (one.name, *one.aliases)}
_REASONING_BY_NAME = {name: one for one in REASONING_FORMATS for name in (one.name, *one.aliases)}
# The first text that a chat template has decides.
_TOOLS_BY_TEXT = (
    ("<|channel|>", "gpt-oss"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
_REASONING_BY_TEXT = (
    ("<|channel|>", "gpt-oss"), ("<think>", "qwen3"), ("</think>", "qwen3"), ("[THINK]", "mistral")
)  # fmt: skip


@lru_cache(maxsize=64)
def tool_format(template: str, named: str | None) -> ToolFormat | None:
    """Return the form of tool calls that a server's setting names, or else a chat template shows; None: none."""
    if named is None:
        text, named = template, next((name for sign, name in _TOOLS_BY_TEXT if sign in template), NONE)
        if named == "deepseek_v3" and "```json" not in text:
            named = "deepseek_v31"
    return None if named == NONE else _TOOLS_BY_NAME[named]


@lru_cache(maxsize=64)
def reasoning_format(template: str, named: str | None) -> ReasoningFormat | None:
    """Return the form of reasoning, likewise."""
    if named is None:
        named = next((name for sign, name in _REASONING_BY_TEXT if sign in template), NONE)
    return None if named == NONE else _REASONING_BY_NAME[named]


@lru_cache(maxsize=64)
def template_of(tools: str | None, reasoning: str | None) -> ResponseTemplate:
    """Return the template of answers in these forms, by their names."""
    fields: dict[str, Any] = {CONTENT: {}}
    if tools is not None:
        fields |= {CALL: _TOOLS_BY_NAME[tools].call, **_TOOLS_BY_NAME[tools].texts}
    if reasoning is not None:
        fields |= {REASONING: _REASONING_BY_NAME[reasoning].reasoning, **_REASONING_BY_NAME[reasoning].texts}
    # A transform lets patterns have names; `as_texts` removes it.
    given = {name: {**one, "transform": "{content}"} for name, one in fields.items()}
    return as_texts(load_response_template({"start_anchor_pattern": r"\A", "fields": given}))


def as_texts(template: ResponseTemplate) -> ResponseTemplate:
    """Return the template with the same fields, whose bodies stay texts: reading them raises no error then. The field
    that has no marker before it has none behind it either, for that would be lost."""
    plain: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "transform": None}
    plain |= {"transform_each": False, "repeats": False, "join": None, "optional": True}
    fields = {name: replace(one, **plain) for name, one in template.fields.items()}
    if template.implicit is not None:
        fields[template.implicit] = replace(fields[template.implicit], close_re=None, close_literals=None)
    return replace(template, defaults={}, fields=fields)
