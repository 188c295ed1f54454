"""The grammar of arguments that are written one by one between markers, texts among them without quotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....rollout.grammars.schemas.references import replaced, resolved
from ..edge.errors import BadField
from .values import types_of

Format = dict[str, Any]  # a part of a structural tag
Text = Callable[[str], list[Format]]  # the parts of a text with markers

_ROOT = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema",
    "default", "examples", "$comment", "$id",
}  # fmt: skip
_WHOLE = "$whole"
_LENGTHS = ("minLength", "maxLength")
_ANY_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True)
class XmlStyle:
    """The markers around an argument. KEY stands for its name."""

    before: str
    closes: str  # ends a text
    after: str = "\n"
    pad: str = ""  # between a value and its end, which readers take off


QWEN = XmlStyle("<parameter=KEY>\n", "</parameter>", pad="\n")
GLM = XmlStyle("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>")


def xml_arguments(style: XmlStyle, schema: Mapping[str, Any] | None, name: str, text: Text) -> list[Format]:
    """Return the parts of a tool's arguments in the order of the schema. schema: None: any arguments. name: the tool's.
    Raises BadField for a schema that these parts cannot enforce."""
    before, _, after = style.before.partition("KEY")
    if schema is None:
        key = [*text(before), {"type": "regex", "pattern": _ANY_KEY}, *text(after)]
        one = [*key, *_any_text(style, text), *text(style.after)]
        return [{"type": "star", "content": {"type": "sequence", "elements": one}}]
    if others := sorted(set(schema) - _ROOT):
        raise BadField("tools", f"{name}: parameters: {', '.join(others)[:200]} cannot be enforced with this model")
    members = dict(schema.get("properties") or {})
    required = schema.get("required") or []
    members |= {key: {} for key in required if key not in members}
    parts: list[Format] = []
    for key, member in members.items():
        if not re.fullmatch(r"[^\s<>]+", key):
            raise BadField("tools", f"{name}: parameters: a name like {key[:100]!r} cannot be enforced with this model")
        value = _value(style, member, schema, f"{name}: {key}", text)
        one = [*text(style.before.replace("KEY", key)), *value, *text(style.after)]
        part = {"type": "sequence", "elements": one}
        parts.append(part if key in required else {"type": "optional", "content": part})
    return parts


def _value(style: XmlStyle, member: Any, root: Mapping[str, Any], name: str, text: Text) -> list[Format]:
    end = text(style.pad + style.closes)
    if types_of(member, root) != {"string"}:
        return [{"type": "json_schema", "json_schema": _alone(member, root), "max_whitespace_cnt": 1}, *end]
    member = resolved(member, root)
    member = member if isinstance(member, Mapping) else {}
    options = [member["const"]] if "const" in member else member.get("enum")
    if isinstance(options, list):
        options = [option for option in options if isinstance(option, str)]
        if wrong := [option for option in options if style.closes in option]:
            raise BadField("tools", f"{name}: {wrong[0][:100]!r} holds {style.closes}, which ends a text of this model")
        choices = [{"type": "const_string", "value": option} for option in options]
        return [choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}, *end]
    if unknown := sorted({"format", "pattern", "anyOf", "oneOf", "allOf"} & set(member)):
        raise BadField("tools", f"{name}: {unknown[0]} of a text cannot be enforced with this model")
    if any(key in member for key in _LENGTHS):
        least, most = (member.get(key, "") for key in _LENGTHS)
        return [{"type": "regex", "pattern": f"[^<\\x00-\\x1f]{{{least or 0},{most}}}"}, *end]
    return _any_text(style, text)


def _alone(member: Any, root: Mapping[str, Any]) -> Any:
    """Return a member's schema as one of its own. Where it has references, the whole schema that they are inside of
    goes along."""

    def name(reference: str) -> str:
        return f"#/{_WHOLE}{reference.removeprefix('#')}"

    own = replaced(member, name)
    return member if own == member else {**own, _WHOLE: replaced(root, name)}


def _any_text(style: XmlStyle, text: Text) -> list[Format]:
    """Return any text and the marker that ends it."""
    end = text(style.closes)
    is_token = len(end) == 1 and end[0]["type"] == "token"
    return [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end[0] if is_token else style.closes}]
