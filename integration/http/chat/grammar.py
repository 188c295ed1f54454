"""The grammars of tool calls that a request demands, and of answers behind reasoning, as structural tags.

xgrammar's own tags of these families (`get_model_structural_tag`) spell markers letter by letter. Here a marker that is
one token of the model is that token, which the model has learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....rollout.grammars.compiler import ANY_JSON, Constraint
from ....rollout.grammars.schemas.bounded import without_control_characters
from ....rollout.grammars.schemas.check import check_schema, parse_json
from ..edge.errors import BadField
from .formats import ReasoningFormat
from .tools import Tools
from .xml_arguments import GLM, QWEN, Format, XmlStyle, xml_arguments

_ANY: Format = {"type": "object"}
_MAX_BLANKS = 2  # one after another in JSON
_SEPARATED = 1  # blank in the JSON of an answer, as it stands behind its commas and colons
_BLANKS: Format = {"type": "regex", "pattern": r"\n{0,2}"}  # that models write between reasoning and an answer
_FINAL = "<|channel|>final<|message|>"  # before an answer of gpt-oss


@dataclass(frozen=True)
class _Shape:
    """The text around the calls of one family. NAME stands for the name."""

    begins: str  # each call
    ends: str
    between: str = ""
    opens: str = ""  # all calls together
    closes: str = ""
    style: XmlStyle | None = None  # of the arguments; None: JSON
    is_single: bool = False  # an answer ends with its first call
    after_reasoning: str = ""


_SHAPES: Mapping[str, _Shape] = {
    "hermes": _Shape(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", after_reasoning="\n\n"
    ),
    "qwen3_coder": _Shape(
        "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "\n", style=QWEN, after_reasoning="\n\n"
    ),
    "llama3_json": _Shape('{"name": "NAME", "parameters": ', "}", "; "),
    "mistral": _Shape("[TOOL_CALLS]NAME[ARGS]", ""),
    "mistral_array": _Shape('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
    "deepseek_v3": _Shape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _Shape(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
    "glm45": _Shape("<tool_call>NAME\n", "</tool_call>", "\n", style=GLM, after_reasoning="\n"),
    "gpt-oss": _Shape(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", is_single=True
    ),
}  # fmt: skip


def tools_grammar(
    name: str, reasoning: ReasoningFormat | None, tools: Tools, ids: Mapping[str, int], *, is_open: bool, is_done: bool
) -> str:
    """Return the structural tag of answers that call tools as their choice demands, or, where it is left to the model,
    of answers whose calls follow their schemas.

    name: of the form of calls. ids: the markers that are tokens. is_open: the answer begins with reasoning that the
    prompt has opened. is_done: it has no reasoning, as the prompt has closed it. Raises BadField.
    """
    if name == "mistral" and "[ARGS]" not in ids:
        name = "mistral_array"
    shape = _SHAPES[name]
    writer = Writer(ids)
    if tools.mode == "required":
        after = _const(shape.after_reasoning)
        parts = [] if reasoning is None else writer.reasoning(reasoning, after, is_open=is_open, is_done=is_done)
        return _tag(_joined([*parts, writer.calls(shape, tools)]))
    if name == "gpt-oss":
        raise BadField("tools", 'strict needs tool_choice "required" or a function by name with this model')
    return _tag(writer.optional_calls(shape, tools, reasoning))


def answer_grammar(constraint: Constraint, reasoning: ReasoningFormat, ids: Mapping[str, int], *, is_open: bool) -> str:
    """Return the structural tag of answers that think first, if they think, and then follow a constraint, which is no
    structural tag itself. ids, is_open: see `tools_grammar`. Raises ValueError for a schema that no grammar
    enforces."""
    writer, text = Writer(ids), constraint.text
    if constraint.kind == "json_schema":
        schema: Any = True if text == ANY_JSON else parse_json(text, constraint.kind)
        check_schema(schema)
        schema = without_control_characters(schema)
        follows: Format = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _SEPARATED}
    elif constraint.kind == "regex":
        follows = {"type": "regex", "pattern": text}
    else:
        follows = {"type": "grammar", "grammar": text}
    before = writer.reasoning(reasoning, [_BLANKS], is_open=is_open, is_done=False)
    final = [] if reasoning.opens else writer.text(_FINAL)
    return _tag(_joined([*before, *final, follows]))


class Writer:
    """Write parts of structural tags, with the markers of one model."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._markers = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or r"(?!)")

    def text(self, text: str) -> list[Format]:
        """Return the parts of a text: its markers are tokens."""
        parts: list[Format] = []
        at = 0
        for match in self._markers.finditer(text):
            parts += _const(text[at : match.start()])
            parts.append({"type": "token", "token": self._ids[match.group()]})
            at = match.end()
        return parts + _const(text[at:])

    def reasoning(
        self, reasoning: ReasoningFormat, after: Sequence[Format], *, is_open: bool, is_done: bool
    ) -> list[Format]:
        """Return the reasoning before a call or an answer. after: what stands between the two."""
        if not reasoning.opens:  # gpt-oss: a message of its own
            analysis = self.text("<|channel|>analysis<|message|>")
            inside = [*analysis, *self._until("<|end|>"), *self.text("<|start|>assistant")]
            return [{"type": "optional", "content": _joined(inside)}]
        if is_done:
            return []
        inside = [*self._until(reasoning.closes), *after]
        if is_open:
            return inside
        return [{"type": "optional", "content": _joined([*self.text(reasoning.opens), *inside])}]

    def calls(self, shape: _Shape, tools: Tools) -> Format:
        """Return one call, or as many as the model writes."""
        return _joined([*self.text(shape.opens), *self._calls(shape, tools), *self.text(shape.closes)])

    def optional_calls(self, shape: _Shape, tools: Tools, reasoning: ReasoningFormat | None) -> Format:
        """Return any text with calls inside."""
        first, *others = self.text(shape.opens or shape.begins.partition("NAME")[0])
        end: Format | str = ""
        if shape.opens:
            content, [closes] = _joined([*others, *self._calls(shape, tools)]), self.text(shape.closes)
            end = closes if closes["type"] == "token" else shape.closes
        else:
            content = _either([_joined(self._call(shape, function, tools)[1:]) for function in tools.callable])
        begin = first if first["type"] == "token" else first["value"]
        tag = {"type": "tag", "begin": begin, "content": content, "end": end}
        found: Format = {"tags": [tag], "stop_after_first": not tools.is_parallel}
        if first["type"] == "token":
            found |= {"type": "token_triggered_tags", "trigger_tokens": [first["token"]]}
        else:
            found |= {"type": "triggered_tags", "triggers": [begin]}
        # The markers of reasoning may stand in the text too: tokens that a tag names may, see `named_tokens`.
        named = [marker for marker in (() if reasoning is None else reasoning.markers) if marker in self._ids]
        if not named:
            return found
        tokens = _either([{"type": "token", "token": self._ids[marker]} for marker in named])
        return _joined([{"type": "optional", "content": tokens}, found])

    def _until(self, marker: str) -> list[Format]:
        """Return any text and the marker that ends it."""
        end = self.text(marker)
        is_token = len(end) == 1 and end[0]["type"] == "token"
        any_text = {"type": "any_text"}
        return [{"type": "tag", "begin": "", "content": any_text, "end": end[0] if is_token else marker}]

    def _calls(self, shape: _Shape, tools: Tools) -> list[Format]:
        calls = [self._call(shape, function, tools) for function in tools.callable]
        if shape.is_single or not tools.is_parallel:
            return [_either([_joined(call) for call in calls])]
        tags = [
            {
                "type": "tag",
                "begin": first if first["type"] == "token" else first["value"],
                "content": _joined(others),
                "end": "",
            }
            for first, *others in calls
        ]
        return [{"type": "tags_with_separator", "tags": tags, "separator": shape.between, "at_least_one": True}]

    def _call(self, shape: _Shape, function: Mapping[str, Any], tools: Tools) -> list[Format]:
        before, _, after = shape.begins.partition("NAME")
        is_loose = function.get("strict") is False or (tools.mode == "auto" and not function.get("strict"))
        schema = None if is_loose else _schema(function)
        if shape.style is not None:
            arguments = xml_arguments(shape.style, schema, function["name"], self.text)
        else:
            arguments = [{"type": "json_schema", "json_schema": schema or _ANY, "max_whitespace_cnt": _MAX_BLANKS}]
        return [*self.text(before), *self.text(function["name"] + after), *arguments, *self.text(shape.ends)]


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, always of an object. Raises BadField where it cannot be enforced."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    if schema["type"] != "object":
        raise BadField("tools", f'{function["name"]}: parameters must have the type "object"')
    try:
        check_schema(schema)
    except ValueError as error:
        reason = str(error).removeprefix("json_schema: ")
        raise BadField(
            "tools", f"{function['name']}: no grammar can enforce its parameters ({reason[:500]}): with strict false "
            "they may be any object"
        ) from None  # fmt: skip
    return schema


def _const(text: str) -> list[Format]:
    return [{"type": "const_string", "value": text}] if text else []


def _joined(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def _either(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def _tag(part: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False)
