"""Answers in the families' own syntax, and the parts that they have."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.integration.http.chat.formats import REASONING, reasoning_format, template_of, tool_format
from lockstep.integration.http.chat.parser import AnswerForm, AnswerParser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {"weather": SCHEMA, "now": {}}
PARIS = ("weather", '{"city": "Zürich 🏔", "days": 2, "where": {"a": [1, {"b": null}]}}')
NOW = ("now", "{}")


class Case(NamedTuple):
    """A text and its parts."""

    tools: str | None
    reasoning: str | None
    text: str
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


_THINK = "<think>\nI should <tool_call> look.\n</think>\n\n"
_THOUGHT = "I should <tool_call> look."
_HERMES = '<tool_call>\n{"name": "weather", "arguments": ' + PARIS[1] + "}\n</tool_call>"
_HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich 🏔\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    '<parameter=where>\n{"a": [1, {"b": null}]}\n</parameter>\n</function>\n</tool_call>'
)
_CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + PARIS[1] + "\n```<｜tool▁call▁end｜>"
_V3_NOW = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + PARIS[1] + "<｜tool▁call▁end｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🏔</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>2</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"a": [1, {"b": null}]}</arg_value>\n</tool_call>'
)
_ANALYSIS = "<|channel|>analysis<|message|>Need to look.<|end|><|start|>assistant"
_COMMENTARY = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

WHOLE = (
    Case("hermes", "qwen3", f"{_THINK}I look.\n{_HERMES}\n{_HERMES_NOW}\n", "I look.", _THOUGHT, (PARIS, NOW)),
    Case("hermes", None, "<tool_call>" + '{"name": "now", "arguments": "{}"}' + "</tool_call>", "", "", (NOW,)),
    Case("qwen3_coder", "qwen3", f"{_THINK}Now:\n{_CODER}\n{_CODER_NOW}", "Now:", _THOUGHT, (PARIS, NOW)),
    Case("llama3_json", None, '{"name": "weather", "parameters": ' + PARIS[1] + "}", "", "", (PARIS,)),
    Case("llama3_json", None, '<|python_tag|>{"name": "now", "parameters": {}}; '
         '{"type": "function", "name": "now", "parameters": {}}', "", "", (NOW, NOW)),
    Case("mistral", "mistral", f"[THINK]Hm[/THINK]So:[TOOL_CALLS]weather[ARGS]{PARIS[1]}[TOOL_CALLS]now[ARGS]{{}}",
         "So:", "Hm", (PARIS, NOW)),
    Case("mistral", None, '[TOOL_CALLS] [{"name": "weather", "arguments": ' + PARIS[1]
         + '}, {"name": "now", "arguments": {}}]', "", "", (PARIS, NOW)),
    Case("mistral", None, "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", "", "", (NOW,)),
    Case("deepseek_v3", "deepseek_r1", f"Hm.\n</think>\n\nSo.{_BEGIN}{_V3}\n{_V3_NOW}{_END}", "So.", "Hm.",
         (PARIS, NOW)),
    Case("deepseek_v31", "qwen3", f"{_BEGIN}{_V31}{_V31}{_END}", "", "", (PARIS, PARIS)),
    Case("glm45", "glm45", f"\n<think>Hm</think>\n{_GLM}\n<tool_call>now\n</tool_call>", "", "Hm", (PARIS, NOW)),
    Case("gpt-oss", "gpt-oss", f"{_ANALYSIS}{_COMMENTARY}{PARIS[1]}<|call|>", "", "Need to look.", (PARIS,)),
    Case("gpt-oss", "gpt-oss", f"{_ANALYSIS} to=functions.now<|channel|>commentary json<|message|>{{}}", "",
         "Need to look.", (NOW,)),
    Case("gpt-oss", "gpt-oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + _COMMENTARY
         + PARIS[1] + "<|call|>", "I look.", "", (PARIS,)),
    Case("gpt-oss", "gpt-oss", f"{_ANALYSIS}<|channel|>final<|message|>It rains.\n<|return|>", "It rains.\n",
         "Need to look."),
)  # fmt: skip

# Texts that are no calls, or no whole ones: all of each stays content.
BROKEN = tuple(
    Case(tools, None, text, text)
    for tools, text in (
        ("hermes", 'a <tool_call>\n{"name": "weather", "arguments": {city: 1}}\n</tool_call> b\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", 'x\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Z'),
        ("hermes", "</tool_call> <tool_"),
        ("hermes", '{"name": "now", "arguments": {}}'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nZ\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nZ"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function> and more</tool_call>"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"name": "now"} is JSON'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Z'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]"),
        (
            "deepseek_v3",
            f"{_BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{<｜tool▁call▁end｜>{_END}",
        ),
        ("deepseek_v31", f"{_BEGIN}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Z"),
        ("gpt-oss", "<|channel|>commentary to=functions.now<|message|>{a}<|call|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.now <|constr"),
        ("gpt-oss", "plain text"),
    )
)


def form_of(case: Case, **settings: Any) -> AnswerForm:
    """Return the form of a case's answers."""
    tools = tool_format("", case.tools) if case.tools else None
    reasoning = reasoning_format("", case.reasoning) if case.reasoning else None
    if reasoning is not None:
        settings |= {"opens": reasoning.opens, "closes": reasoning.closes, "begins_inside": reasoning.begins_inside}
    template = template_of(tools and tools.name, reasoning and reasoning.name)
    return AnswerForm(template, tools and tools.read, SCHEMAS, values=tools and tools.values, **settings)


def parts_of(form: AnswerForm, pieces: list[str], prefix: str = "") -> Case:
    """Return the parts of an answer that comes in pieces."""
    parser = AnswerParser(form, prefix)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in {part.kind for part in parts}}
    calls = tuple((part.call.name, part.call.arguments) for part in parts if part.call is not None)
    return Case(None, None, "", texts.get("content", ""), texts.get(REASONING, ""), calls)
