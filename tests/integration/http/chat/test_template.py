"""Tests of conversations as chat templates write them that leave out, move or refuse a part of some of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.integration.http.chat.template import apply_template, settings_of, with_effort
from lockstep.integration.http.edge.errors import BadField
from lockstep.tests.support.chat.tokenizer import byte_tokenizer

WRITES = "{{ m.role }}: {{ m.content }}\n"
# Takes the first message alone from a developer or a system, as gpt-oss's template.
FIRST_ALONE = (
    "{% if messages[0].role in ('system', 'developer') %}developer: {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + WRITES + "{% endif %}{% endfor %}"
)
# Writes the texts of all systems at the beginning, as DeepSeek-V3's template.
HOISTS = (
    "{% for m in messages %}{% if m.role == 'system' %}" + WRITES + "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}" + WRITES + "{% endif %}{% endfor %}"
)
# Has room for one text of a system, which the last one takes, as the template of DeepSeek-R1's distilled models.
LAST_ALONE = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}system: {{ ns.system }}\n"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + WRITES + "{% endif %}{% endfor %}"
)
# Refuses systems that are not first, and developers.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('late') }}{% endif %}" + WRITES + "{% endfor %}"
)
EVERY = "{% for m in messages %}" + WRITES + "{% endfor %}"
ASK: dict[str, Any] = {"role": "user", "content": "ask"}
NAMES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def fields(**given: object) -> Any:
    names = ("chat_template_kwargs", "reasoning_effort", "add_generation_prompt")
    return SimpleNamespace(**dict.fromkeys(names), continue_final_message=False, **given)


def written(template: str, messages: list[dict[str, Any]], tools: Any = (), **images: object) -> str:
    """Return the text that a template makes of messages."""
    engine: Any = SimpleNamespace(tokenizer=byte_tokenizer(template), model=SimpleNamespace(images=None))
    return apply_template(engine, messages, fields(), tools)


# -- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("effort", "own", "seen"), [
    ("none", None, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
    ("low", None, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
    ("none", {"thinking": True}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}),
    (None, {"a": 1}, {"a": 1}), (None, None, {}),
])  # fmt: skip
def test_an_effort_says_whether_the_template_thinks_unless_its_variables_do(effort, own, seen):
    asked: Any = SimpleNamespace(reasoning_effort=effort, chat_template_kwargs=own)
    assert settings_of(asked) == seen


ON, OFF = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False))


@pytest.mark.parametrize(("given", "effort", "variables"), [
    ({"reasoning": {"effort": "none"}}, "none", None), ({"reasoning": {"enabled": True}}, None, ON),
    ({"reasoning": {"enabled": False, "effort": "low"}}, "low", OFF), ({"thinking": {"type": "disabled"}}, None, OFF),
    ({"thinking": True}, None, ON), ({"reasoning": None, "thinking": None}, None, None),
    ({"thinking": False, "chat_template_kwargs": {"thinking": True}}, None, {**OFF, "thinking": True}),
])  # fmt: skip
def test_sglangs_fields_of_reasoning_are_those_of_the_chat(given, effort, variables):
    found = with_effort(given)
    assert (found.get("reasoning_effort"), found.get("chat_template_kwargs")) == (effort, variables)


@pytest.mark.parametrize(("given", "field"), [
    ({"reasoning": "none"}, "reasoning"), ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"enabled": "no"}}, "reasoning.enabled"), ({"thinking": {"type": "much"}}, "thinking"),
    ({"thinking": "off"}, "thinking"), ({"thinking": {"type": []}}, "thinking"),
])  # fmt: skip
def test_wrong_values_of_sglangs_fields_of_reasoning_are_refused_by_name(given, field):
    with pytest.raises(BadField) as refused:
        with_effort(given)
    assert refused.value.param == field


# -- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("roles", "expected"), [
    ("su", "developer: 0\nuser: 1\n"), ("du", "developer: 0\nuser: 1\n"), ("sdu", "developer: 0\n\n1\nuser: 2\n"),
    ("suasu", "developer: 0\nuser: 1\nassistant: 2\nuser: 3\n\n4\n"),
    ("dduadu", "developer: 0\n\n1\nuser: 2\nassistant: 3\nuser: 4\n\n5\n"),
    ("uadu", "user: 0\nassistant: 1\nuser: 2\n\n3\n"),
])  # fmt: skip
def test_no_text_is_lost_where_a_template_takes_the_first_message_alone(roles, expected):
    messages = [{"role": NAMES[role], "content": str(number)} for number, role in enumerate(roles)]
    assert written(FIRST_ALONE, messages) == expected


@pytest.mark.parametrize(("template", "expected"), [
    (EVERY, "system: 0\ndeveloper: 1\nuser: 2\nassistant: 3\nsystem: 4\nuser: 5\n"),
    (HOISTS, "system: 0\ndeveloper: 1\nuser: 2\nassistant: 3\nuser: 4\n\n5\n"),
    (LAST_ALONE, "system: 0\n\n1\nuser: 2\nassistant: 3\nuser: 4\n\n5\n"),
    (STRICT, "system: 0\n\n1\nuser: 2\nassistant: 3\nuser: 4\n\n5\n"),
])  # fmt: skip
def test_texts_of_systems_stand_in_their_places_whatever_the_template_makes_of_them(template, expected):
    messages = [{"role": NAMES[role], "content": str(number)} for number, role in enumerate("sduasu")]
    assert written(template, messages) == expected
    assert "system: x" in written(STRICT, [{"role": "system", "content": "x"}, {"role": "assistant"}])


# -- tools -----------------------------------------------------------------------------------------------------------

UNDESCRIBED: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_a_tool_without_a_description_has_an_empty_one_where_the_template_needs_it():
    needs = "{% for tool in tools %}{{ '// ' + tool.function.description + ' ' + tool.function.name }}.{% endfor %}"
    described = [{"type": "function", "function": {"name": "g", "description": "d"}}]
    null = [{"type": "function", "function": {"name": "h", "description": None}}]
    assert written(needs, [ASK], [*UNDESCRIBED, *described, *null]) == "//  f.// d g.//  h."
    assert written("{{ tools | tojson }}", [ASK], UNDESCRIBED) == json.dumps(UNDESCRIBED)
    with pytest.raises(BadField, match="no tools here"):
        written("{{ raise_exception('no tools here') }}", [ASK], UNDESCRIBED)


# -- calls -----------------------------------------------------------------------------------------------------------

_CALLS = "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}."
# Writes calls only where the content is none, as the template of DeepSeek-R1's distilled models.
ONLY_WITHOUT_CONTENT = (
    "{% for m in messages %}{% if m.tool_calls and m.content is none %}calls: " + _CALLS + "\n"
    "{% else %}" + WRITES + "{% endif %}{% endfor %}"
)
# Refuses thoughts beside content and a call, and writes one call alone, as gpt-oss's template.
STRICT_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}calls: {{ m.content or m.thinking }}({{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}).\n{% else %}" + WRITES + "{% endif %}{% endfor %}"
)
# Refuses an answer with two calls, as the template of Llama 3.1.
SINGLE_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single') }}{% endif %}calls: " + _CALLS + "\n{% else %}" + WRITES + "{% endif %}{% endfor %}"
)
EVERY_CALL = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + _CALLS + "\n{% endfor %}"


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id-{name}", "content": f"of {name}"}


def answer(content: str, *calls: dict[str, Any], **others: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **others}


@pytest.mark.parametrize(("content", "expected"), [
    ("", "user: ask\ncalls: (f {}).\ntool: of f\n"), ("hm", "user: ask\nassistant: hm\ncalls: (f {}).\ntool: of f\n"),
])  # fmt: skip
def test_calls_are_written_where_the_template_wants_no_content_beside_them(content, expected):
    assert written(ONLY_WITHOUT_CONTENT, [ASK, answer(content, call("f")), result("f")]) == expected
    both = written(ONLY_WITHOUT_CONTENT, [ASK, answer(content, call("f"), call("g")), result("f"), result("g")])
    assert both == expected.replace("(f {})", "(f {})(g {})") + "tool: of g\n"


@pytest.mark.parametrize(("content", "thoughts", "expected"), [
    ("c", "t", "t\n\nc"), ("", "t", "t"), ("c", None, "c"),
])  # fmt: skip
def test_content_is_the_end_of_thoughts_where_the_template_takes_one_of_them(content, thoughts, expected):
    others = {} if thoughts is None else {"reasoning_content": thoughts}
    found = written(STRICT_CALLS, [ASK, answer(content, call("f"), **others), result("f")])
    assert found == f"user: ask\ncalls: {expected}(f {{}}).\ntool: of f\n"


@pytest.mark.parametrize("template", [SINGLE_CALLS, STRICT_CALLS.replace("{{ m.content or m.thinking }}", "")])
def test_each_call_has_its_own_result_behind_it_where_the_template_writes_one_of_an_answer(template):
    calls = [call("f"), call("g", a=2), call("h", a=3)]
    for results in ([result("f"), result("g"), result("h")], [result("h"), result("g"), result("f")]):
        found = written(template, [ASK, answer("", *calls), *results, ASK])
        assert found == (
            'user: ask\ncalls: (f {}).\ntool: of f\ncalls: (g {"a": 2}).\ntool: of g\n'
            'calls: (h {"a": 3}).\ntool: of h\nuser: ask\n'
        )
    unnamed = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    found = written(template, [ASK, answer("", *calls[:2]), *unnamed])
    assert found == 'user: ask\ncalls: (f {}).\ntool: 1\ncalls: (g {"a": 2}).\ntool: 2\n'


def test_calls_stay_as_they_were_sent_where_the_template_writes_them_all():
    told = [ASK, answer("c", call("f"), call("g"), reasoning_content="t"), result("g"), result("f"), {"role": "tool"}]
    assert written(EVERY_CALL, told).startswith("user: ask.\nassistant: c(f {})(g {}).\ntool: of g.\ntool: of f.\n")
