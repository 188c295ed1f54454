"""The tools of a request: their checks, and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..edge.errors import BadField
from ..generation.limits import RequestLimits

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # as with Anthropic; OpenAI has 64, and namespaces in front
_CHOICES = '"none", "auto", "required", a function by name, or allowed_tools'


class ToolFields(Protocol):
    """The fields of a request that name its tools."""

    tools: list[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool | None


@dataclass(frozen=True)
class Tools:
    """The tools that an answer may call."""

    shown: tuple[dict[str, Any], ...]  # to the chat template
    callable: tuple[dict[str, Any], ...]  # the functions of those that may be called
    mode: Literal["auto", "required"]
    is_parallel: bool  # False: at most one call

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool's parameters, by name."""
        return {function["name"]: function.get("parameters") or {} for function in map(_function, self.shown)}

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar is needed: for a call that is demanded, or for one that must follow its schema."""
        return self.mode == "required" or any(function.get("strict") for function in self.callable)


def read_tools(fields: ToolFields, limits: RequestLimits) -> Tools | None:
    """Read the tools and the choice; None: the answer calls none. Raises BadField."""
    given, choice = fields.tools or [], fields.tool_choice
    limits.tools(given, "tools")
    functions = {function["name"]: function for function in map(_checked, given)}
    if len(functions) < len(given):
        names = [_function(tool)["name"] for tool in given]
        raise BadField("tools", f"two have the name {next(n for n in names if names.count(n) > 1)!r}")
    is_parallel = fields.parallel_tool_calls is not False
    if choice in (None, "auto", "none"):
        if not given or choice == "none":
            return None
        return Tools(tuple(given), tuple(functions.values()), "auto", is_parallel)
    if choice == "required":
        if not given:
            raise BadField("tool_choice", '"required" needs tools')
        return Tools(tuple(given), tuple(functions.values()), "required", is_parallel)
    if not isinstance(choice, Mapping):
        raise BadField("tool_choice", f"must be {_CHOICES}")
    if choice.get("type") == "function":
        return Tools(tuple(given), (_named(choice, functions),), "required", False)
    if choice.get("type") != "allowed_tools":
        raise BadField("tool_choice", f"must be {_CHOICES}")
    inner = choice.get("allowed_tools")
    allowed, mode = (inner.get("tools"), inner.get("mode")) if isinstance(inner, Mapping) else (None, None)
    if not isinstance(allowed, list) or not allowed or len(allowed) > len(given) or mode not in ("auto", "required"):
        raise BadField("tool_choice", 'allowed_tools needs the mode "auto" or "required", and a list of some of tools')
    kept = {function["name"]: function for function in (_named(one, functions) for one in allowed)}
    shown = tuple(tool for tool in given if _function(tool)["name"] in kept)
    return Tools(shown, tuple(kept.values()), mode, is_parallel)


def _named(choice: object, functions: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    inner = choice.get("function") if isinstance(choice, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or name not in functions:
        raise BadField("tool_choice", f"names no function of tools: {str(name)[:100]!r}")
    return functions[name]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return function


def _checked(tool: object) -> dict[str, Any]:
    """Return the function of a tool. Raises BadField."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise BadField("tools", 'each must be {"type": "function", "function": {...}}')
    function = _function(tool)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadField(
            "tools", f"a name has 1 to 128 of the characters a-z, A-Z, 0-9, _ and -, not {str(name)[:100]!r}"
        )
    for key, kind, what in (
        ("description", str, "a text"), ("parameters", dict, "a JSON schema, an object"), ("strict", bool, "a boolean"),
    ):  # fmt: skip
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise BadField("tools", f"{name}: {key} must be {what}")
    return function
