"""Tests of the comparison of messages: an answer that comes back with the changes that clients make is the same."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lockstep.integration.http.chat.content import read_message
from lockstep.integration.http.conversations.messages import Likeness, chained, encoded, likeness

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0, "a": ["x", null]}'}}
OTHER, SAME, NAMED, EXACT = Likeness


def assistant(content: Any = "", **others: object) -> dict[str, Any]:
    return read_message({"role": "assistant", "content": content, **others}, "messages.0")


def call(arguments: object, **others: object) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": arguments}, **others}


ANSWER = assistant("yes.\n", reasoning_content="hm\n", tool_calls=[CALL])


def as_input(arguments: str) -> str:
    return json.dumps({"input": arguments})


@pytest.mark.parametrize("arguments", [
    '{"patch": "x"}', '{"input": 5}', '{"input": "a", "b": 1.0}', '{"input": "\\ud800"}', "{}", '{"patch": "\\ud800"}',
    json.dumps({"input": '{"a": "\ud800"}'}), json.dumps({"input": '{"a": 1}', "b": '{"a": 1}'}),
], ids=str)  # fmt: skip
def test_a_call_of_a_custom_tool_is_recognised_by_the_json_that_the_tool_got(arguments):
    ours, theirs = (assistant(tool_calls=[call(one)]) for one in (arguments, as_input(arguments)))
    assert likeness(ours, theirs, is_answer=True) is NAMED and likeness(theirs, theirs, is_answer=True) is EXACT
    assert chained(b"", [ours]) == chained(b"", [theirs])
    other = assistant(tool_calls=[call(as_input('{"patch": "y"}'))])
    assert likeness(ours, other, is_answer=True) is likeness(theirs, other, is_answer=True) is OTHER


def test_texts_of_custom_tools_that_are_no_json_differ():
    texts = ["", "{", "x", "{x}", '{"a": 1} x', "[1]", "[2]", "{\"a\":" * 100_000, "{\"a\":" * 5 + "1" + "}" * 5,
             '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' + "[" * 900 + "]" * 900 + "}"]  # fmt: skip
    calls = [assistant(tool_calls=[call(as_input(text))]) for text in texts]
    for at, ours in enumerate(calls):
        assert [likeness(ours, theirs, is_answer=True) is OTHER for theirs in calls] == [
            i != at for i in range(len(calls))
        ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, EXACT),
        ({"refusal": None, "audio": None, "annotations": [], "function_call": None}, EXACT),
        ({"content": [{"type": "text", "text": "yes."}, {"type": "text", "text": "\n"}]}, EXACT),
        ({"reasoning_content": None}, EXACT),
        ({"reasoning_content": ""}, EXACT),
        ({"tool_calls": [call({"a": ["x", None], "b": 1.0})]}, EXACT),
        ({"content": "yes."}, NAMED),
        ({"content": " yes."}, NAMED),
        ({"reasoning_content": "hm"}, NAMED),
        ({"reasoning_content": None, "reasoning": "hm"}, NAMED),
        ({"tool_calls": [call('{"a":["x",null],"b":1}')]}, NAMED),
        ({"tool_calls": [{"id": "toolu_7", "index": 0, "function": CALL["function"]}]}, SAME),
        ({"provider_specific_fields": {"a": 1}, "name": "planner"}, NAMED),
        ({"content": "yes"}, OTHER),
        ({"content": "Yes.\n"}, OTHER),
        ({"reasoning_content": "no"}, OTHER),
        ({"tool_calls": None}, OTHER),
        ({"tool_calls": [CALL, CALL]}, OTHER),
        ({"tool_calls": [{**CALL, "function": {**CALL["function"], "name": "g"}}]}, OTHER),
        ({"tool_calls": [call('{"a": ["x", null], "b": 1.5}')]}, OTHER),
        ({"tool_calls": [call('{"a": ["x", null], "b": true}')]}, OTHER),
        ({"tool_calls": [call('{"a": ["x", null], "b": "1"}')]}, OTHER),
        ({"tool_calls": [call('{"a": [null, "x"], "b": 1}')]}, OTHER),
        ({"tool_calls": [call("{}")]}, OTHER),
        ({"role": "user", "tool_calls": None}, OTHER),
    ],
)
def test_an_answer_is_recognised_where_it_is_the_same(fields, expected):
    sent = {"role": "assistant", "content": "yes.\n", "reasoning_content": "hm\n", "tool_calls": [CALL], **fields}
    theirs = read_message(sent, "messages.0")
    assert likeness(ANSWER, theirs, is_answer=True) is expected
    if expected is not OTHER:
        assert chained(b"", [ANSWER]) == chained(b"", [theirs]), "it is found"


def test_an_answer_without_content_is_null_an_empty_text_or_absent():
    empty = assistant(None, tool_calls=[CALL])
    for theirs in (assistant("", tool_calls=[CALL]), assistant([], tool_calls=[CALL]),
                   read_message({"role": "assistant", "tool_calls": [CALL]}, "")):  # fmt: skip
        assert likeness(empty, theirs, is_answer=True) is EXACT
        assert chained(b"", [empty]) == chained(b"", [theirs])


def test_what_was_not_sampled_counts_as_it_was_written():
    ours = assistant("yes", tool_calls=[CALL])
    assert likeness(ours, assistant("yes", tool_calls=[CALL]), is_answer=False) is EXACT
    for theirs in (assistant("yes\n", tool_calls=[CALL]), assistant("yes", tool_calls=[{**CALL, "id": "x"}])):
        assert likeness(ours, theirs, is_answer=False) is OTHER
    system = {"role": "system", "content": "be"}
    assert likeness(system, {**system, "content": "be "}, is_answer=False) is OTHER
    assert chained(b"", [system]) != chained(b"", [{**system, "content": "be "}])


@pytest.mark.parametrize("written", ["1.0", "1e3", "-0.0", "12345678901234567890", "-9007199254740993", "0.1", "1e999",
                                     "1" + "0" * 400])  # fmt: skip
def test_numbers_come_back_as_javascript_writes_them(written):
    value = float(written)
    as_double = written if value in (float("inf"), float("-inf")) else json.dumps(value)
    told = json.dumps(int(value)) if value.is_integer() and abs(value) < 1e21 else as_double
    ours, theirs = (assistant(tool_calls=[call(f'{{"n": {text}}}')]) for text in (written, told))
    assert likeness(ours, theirs, is_answer=True) is not OTHER
    assert chained(b"", [ours]) == chained(b"", [theirs])


def test_half_of_a_pair_and_deep_arguments_are_kept():
    deep = "[" * 400 + "]" * 400
    for arguments in ('{"a": "\\ud800"}', f'{{"a": {deep}}}'):
        message = assistant(tool_calls=[call(arguments)])
        assert json.loads(encoded(message)) == message
        assert likeness(json.loads(encoded(message)), message, is_answer=True) is EXACT
        assert chained(b"", [message])


def test_what_is_the_same_has_the_same_digest():
    draw = random.Random(5)
    calls = [[], [CALL], [call('{"a": 1}')], [call('{"a": 1.0}', id="x")], [CALL, CALL]]
    messages = [
        assistant(draw.choice(["", "a", "a ", "\na"]), reasoning_content=draw.choice(["", "b", " b"]),
                  tool_calls=draw.choice(calls))
        for _ in range(120)
    ]  # fmt: skip
    num_same = 0
    for ours in messages:
        for theirs in messages:
            if likeness(ours, theirs, is_answer=True) is not OTHER:
                num_same += 1
                assert chained(b"start", [ours]) == chained(b"start", [theirs])
    assert 120 < num_same < 120 * 120
