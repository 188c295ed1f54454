"""Tests of the tools of a request, and of the choice among them, as a chat has them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.responses.tools import (
    ToolName,
    custom_arguments,
    custom_input,
    translated_choice,
    translated_tools,
)

NOW = {"type": "function", "name": "now", "description": "Time.", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Edit."}
CLOCK = {"type": "namespace", "name": "clock", "description": "A clock.", "tools": [NOW, PATCH]}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_functions_are_flat_here_and_the_chat_gets_only_its_fields():
    [tool], names = translated_tools([{**NOW, "output_schema": {}, "defer_loading": False}])  # type: ignore[misc]
    assert tool == {"type": "function", "function": {name: NOW[name] for name in NOW if name != "type"}}
    assert names.of("now") == ToolName("function", "now") and names.of("other") == ToolName("function", "other")
    assert translated_tools(None)[0] is None


def test_a_custom_tool_is_a_function_of_one_text_whose_description_shows_the_grammar():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools, names = translated_tools([{**PATCH, "format": grammar}])
    assert tools is not None
    function = tools[0]["function"]
    assert function["description"] == "Edit.\n\nThe input follows this lark grammar:\nstart: /a/"
    assert function["parameters"]["required"] == ["input"] and names.of("patch").kind == "custom"
    for text in ("", 'a "b"\n', '{"input": "x"}', "ü"):
        assert custom_input(custom_arguments(text)) == text
    deep = "[" * 100_000 + "]" * 100_000
    for other in (deep, '{"input": "\\ud800"}', '{"patch": "x"}', '{"input": 5}', '{"input": "a", "b": 1}', "[]"):
        assert custom_input(other) == other


def test_the_tools_of_a_namespace_have_its_name_before_theirs():
    tools, names = translated_tools([NOW, CLOCK, {**CLOCK, "name": "mcp__a__"}])
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools] == [
        "now", "clock__now", "clock__patch", "mcp__a__now", "mcp__a__patch"
    ]  # fmt: skip
    assert names.of("clock__patch") == ToolName("custom", "patch", "clock")


def test_choices_name_tools_of_each_type():
    _, names = translated_tools([NOW, PATCH, CLOCK])
    for same in (None, "auto", "none", "required", 5):
        assert translated_choice(same, names) == same
    assert translated_choice({"type": "function", "name": "now"}, names) == chosen("now")
    assert translated_choice({"type": "custom", "name": "patch"}, names) == chosen("patch")
    inside = {"type": "function", "name": "now", "namespace": "clock"}
    assert translated_choice(inside, names) == chosen("clock__now")
    some = {"type": "allowed_tools", "mode": "required", "tools": [inside, {"type": "custom", "name": "patch"}]}
    assert translated_choice(some, names) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [chosen("clock__now"), chosen("patch")]},
    }


WRONG_TOOLS = [
    (5, "tools.0"), ({}, "tools.0"), ({"type": "web_search"}, "tools.0"), ({"type": []}, "tools.0"),
    ({"type": "mcp", "server_label": "a"}, "tools.0"), ({"type": "function"}, "tools.0.name"),
    ({"type": "function", "function": {"name": "f"}}, "tools.0.function"), ({**NOW, "name": []}, "tools.0.name"),
    ({**NOW, "defer_loading": True}, "tools.0.defer_loading"), ({**PATCH, "description": 5}, "tools.0.description"),
    ({**PATCH, "format": "text"}, "tools.0.format"), ({**PATCH, "format": {"type": "regex"}}, "tools.0.format"),
    ({**PATCH, "format": {"type": "grammar", "syntax": "lark"}}, "tools.0.format.definition"),
    ({**CLOCK, "name": ""}, "tools.0.name"), ({**CLOCK, "tools": 5}, "tools.0.tools"),
    ({**CLOCK, "tools": [5]}, "tools.0.tools.0"), ({**CLOCK, "tools": [CLOCK]}, "tools.0.tools.0"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "place"), WRONG_TOOLS, ids=str)
def test_wrong_tools_and_those_of_openais_servers_are_refused_at_their_place(tool, place):
    with pytest.raises(BadField) as told:
        translated_tools([tool])
    assert told.value.param == place


@pytest.mark.parametrize(("choice", "place"), [
    ({}, "tool_choice"), ({"type": "web_search_preview"}, "tool_choice"), ({"type": "mcp"}, "tool_choice"),
    ({"type": "function", "name": "other"}, "tool_choice"), ({"type": "custom", "name": "now"}, "tool_choice"),
    ({"type": "function", "name": "now", "namespace": "a"}, "tool_choice"), ({"type": {}, "name": []}, "tool_choice"),
    ({"type": "function", "function": {"name": "now"}}, "tool_choice"),
    ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [5]}, "tool_choice.tools.0"),
], ids=str)  # fmt: skip
def test_wrong_choices_are_refused_at_their_place(choice, place):
    _, names = translated_tools([NOW, PATCH])
    with pytest.raises(BadField) as told:
        translated_choice(choice, names)
    assert told.value.param == place
