"""Tools and the choice among them, as a chat has them, and the calls of an answer, as this API has them.

| here | in the chat |
|---|---|
| function, flat | function |
| custom: one text, perhaps of a grammar | function of one text, `input`; its description shows the grammar |
| namespace: tools with a common name | functions that are called NAMESPACE__NAME |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chat.values import is_unicode
from ..conversations.messages import INPUT
from ..edge.errors import BadField

_KINDS = "only the types function, custom and namespace are supported: other tools run on OpenAI's servers"
_CUSTOM_PARAMETERS = {
    "type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False,
}  # fmt: skip


@dataclass(frozen=True)
class ToolName:
    """The name of a tool in the request."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class ToolNames:
    """The names of a request's tools, by those in the chat."""

    by_name: dict[str, ToolName] = field(default_factory=dict)

    def of(self, name: str) -> ToolName:
        """Return the tool that an answer calls, which may be none of the request's."""
        return self.by_name.get(name) or ToolName("function", name)


def joined(namespace: str | None, name: str) -> str:
    """Return the name in the chat of a tool in a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def translated_tools(given: list[Any] | None) -> tuple[list[dict[str, Any]] | None, ToolNames]:
    """Return the tools of the chat and the names that they have in the request. Raises BadField."""
    if given is None:
        return None, ToolNames()
    names = ToolNames()
    found = []
    for index, tool in enumerate(given):
        for place, namespace, one in _members(tool, f"tools.{index}"):
            function = _function(one, place)
            its = ToolName(one["type"], function["name"], namespace)
            function["name"] = joined(namespace, function["name"])
            names.by_name[function["name"]] = its
            found.append({"type": "function", "function": function})
    return found, names


def translated_choice(given: object, names: ToolNames) -> object:
    """Return the choice of the chat, which checks what is not changed here. Raises BadField."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type")
    if kind in ("function", "custom"):
        return _named(given, names, "tool_choice")
    if kind != "allowed_tools":
        raise BadField("tool_choice", f"{_shown(kind)}: {_KINDS}")
    tools = given.get("tools")
    if not isinstance(tools, list):
        raise BadField("tool_choice.tools", "must be a list of some of tools")
    inner = [_named(tool, names, f"tool_choice.tools.{index}") for index, tool in enumerate(tools)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": inner}}


def custom_input(arguments: str) -> str:
    """Return the text that a call gives to a custom tool; arguments of another form as they are."""
    try:
        value = json.loads(arguments)
    except RecursionError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) and is_unicode(text) else arguments


def custom_arguments(text: str) -> str:
    """Return the arguments of the chat's call that gives a text to a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _members(tool: object, place: str) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """List the tools that one stands for, each with its place and its namespace. Raises BadField."""
    if not isinstance(tool, dict):
        raise BadField(place, f"must be an object, not {_shown(tool)}")
    if tool.get("type") != "namespace":
        yield place, None, tool
        return
    name, members = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise BadField(f"{place}.name", "a namespace needs a name")
    if not isinstance(members, list):
        raise BadField(f"{place}.tools", "must be a list")
    for index, member in enumerate(members):
        at = f"{place}.tools.{index}"
        if not isinstance(member, dict):
            raise BadField(at, f"must be an object, not {_shown(member)}")
        yield at, name, member


def _function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the function of the chat. Raises BadField."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise BadField(place, f"a tool of the type {_shown(kind)}: {_KINDS}")
    if isinstance(tool.get("function"), dict):
        raise BadField(f"{place}.function", "is a chat's form: here name, parameters and strict stand beside type")
    if not isinstance(tool.get("name"), str):
        raise BadField(f"{place}.name", "must be a text")
    if tool.get("defer_loading"):
        raise BadField(f"{place}.defer_loading", "is not supported: all tools are shown to the model")
    if kind == "custom":
        return _custom(tool, place)
    return {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}


def _custom(tool: dict[str, Any], place: str) -> dict[str, Any]:
    description, form = tool.get("description"), tool.get("format")
    if description is not None and not isinstance(description, str):
        raise BadField(f"{place}.description", "must be a text")
    if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "grammar")):
        raise BadField(f"{place}.format", 'needs the type "text" or "grammar"')
    texts = [description or ""]
    if form is not None and form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        for key, value in (("syntax", syntax), ("definition", definition)):
            if not isinstance(value, str):
                raise BadField(f"{place}.format.{key}", "must be a text")
        texts.append(f"The input follows this {syntax} grammar:\n{definition}")
    return {
        "name": tool["name"],
        "description": "\n\n".join(filter(None, texts)),
        "parameters": _CUSTOM_PARAMETERS,
    }


def _named(choice: object, names: ToolNames, place: str) -> dict[str, Any]:
    """Return the choice of one tool in the chat. Raises BadField."""
    if not isinstance(choice, Mapping):
        raise BadField(place, "must be an object")
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    if isinstance(name, str) and (namespace is None or isinstance(namespace, str)):
        found = joined(namespace, name)
        if names.by_name.get(found) == ToolName(str(kind), name, namespace):
            return {"type": "function", "function": {"name": found}}
    raise BadField(place, f"names no tool of the type {_shown(kind)} of tools: {_shown(name)}")


def _shown(value: object) -> str:
    return repr(value[:100]) if isinstance(value, str) else type(value).__name__
