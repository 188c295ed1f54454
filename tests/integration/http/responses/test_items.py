"""Tests of the reading of a request's items as the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integration.http.edge.errors import BadField, HttpError
from lockstep.integration.http.responses.items import read_input
from lockstep.integration.http.responses.places import Places

THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look", "annotations": []}]}
CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"a": 1}', "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
PIXEL = "data:image/png;base64,AAAA"


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return read_input(list(items), instructions, Places())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def a_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_text_is_a_users_message_and_instructions_are_a_systems_before_it():
    assert read_input("Hi", None, Places()) == [user("Hi")]
    assert read_input("Hi", "Be brief.", Places()) == [{"role": "system", "content": "Be brief."}, user("Hi")]


def test_messages_have_texts_of_all_types_and_images():
    parts = [{"type": kind, "text": kind[0]} for kind in ("input_text", "output_text", "text")]
    assert messages(user("a"), {"type": "message", **user(parts)}) == [user("a"), user("iot")]
    assert messages({"role": "developer", "content": "d"}) == [{"role": "developer", "content": "d"}]
    image = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    assert messages(user([parts[0], image])) == [
        user([{"type": "text", "text": "i"}, {"type": "image_url", "image_url": {"url": PIXEL}}])
    ]


def test_items_of_the_assistant_that_follow_one_another_are_one_message():
    second = {**CALL, "call_id": "call_2"}
    assert messages(user("a"), THOUGHT, SAID, CALL, second, OUTPUT, {**OUTPUT, "call_id": "call_2"}, SAID) == [
        user("a"),
        {"role": "assistant", "content": "Look", "reasoning_content": "Hm.",
         "tool_calls": [a_call("call_1", "now", '{"a": 1}'), a_call("call_2", "now", '{"a": 1}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "call_2", "content": "12:00"},
        {"role": "assistant", "content": "Look"},
    ]  # fmt: skip


def test_items_of_several_answers_are_several_messages():
    def said(text: str, *id: str) -> dict[str, Any]:
        return {**SAID, "content": text, **dict(zip(["id"], id, strict=False))}

    def contents(*items: Any) -> list[str]:
        return [one["content"] for one in messages(*items)]

    first = {**THOUGHT, "id": "rs_a_b_0"}, said("A", "msg_a_b_1"), {**CALL, "id": "fc_a_b_2"}
    found = messages(user("a"), *first, said("B", "msg_c_0"), {**CALL, "type": "custom_tool_call", "input": ""})
    assert [(one["content"], len(one.get("tool_calls", ()))) for one in found] == [("a", 0), ("A", 1), ("B", 1)]
    assert contents(said("A", "msg_a_1"), said("B"), said("C", "msg_a_10")) == ["ABC"]
    assert contents(said("A"), said("B", "msg_a_1"), said("C"), said("D", "msg_b_1")) == ["ABC", "D"]
    for other in ("msg_0123456789", "", 5, None, [], "msg__1", "item_b_1", "msg_b_1x"):
        assert contents(said("A", "msg_a_1"), {**said("B"), "id": other}) == ["AB"]


def test_texts_around_a_call_are_one_content():
    assert messages(SAID, CALL, {**SAID, "content": "ing"})[0]["content"] == "Looking"


def test_thoughts_are_those_of_the_content_or_else_of_the_summary():
    summary = [{"type": "summary_text", "text": "In short."}]
    assert messages({**THOUGHT, "summary": summary})[0]["reasoning_content"] == "Hm."
    assert messages({**THOUGHT, "summary": summary, "content": []})[0]["reasoning_content"] == "In short."
    assert messages({"type": "reasoning", "summary": []}, SAID) == [{"role": "assistant", "content": "Look"}]
    with pytest.raises(BadField, match=r"^input\.0\.encrypted_content: is another server's"):
        messages({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"})


def test_calls_of_custom_tools_and_of_namespaces_have_the_names_and_arguments_of_the_chat():
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": '*** "a"\n'}
    assert messages(custom, {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}) == [
        {"role": "assistant", "content": None, "tool_calls": [a_call("c", "patch", '{"input": "*** \\"a\\"\\n"}')]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    [message] = messages({**CALL, "namespace": "clock"})
    assert message["tool_calls"][0]["function"]["name"] == "clock__now"


def test_an_output_of_a_call_may_have_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({**OUTPUT, "output": parts})[0]["content"] == "ab"
    found = messages({**OUTPUT, "output": [parts[0], {"type": "input_image", "image_url": PIXEL}]})
    assert found[0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}


WRONG = [
    (5, "input.1"), ([], "input.1"), ({}, "input.1"), ({"type": 5}, "input.1"), ({"type": ["message"]}, "input.1"),
    ({"type": "item_reference", "id": "a"}, "input.1"), ({"type": "web_search_call"}, "input.1"),
    ({"type": "message", "content": "a"}, "input.1.role"), ({"role": 5, "content": "a"}, "input.1.role"),
    ({"role": "tool", "content": "a"}, "input.1.role"), ({"role": "user"}, "input.1.content"),
    (user(5), "input.1.content"), (user({}), "input.1.content"), (user([5]), "input.1.content.0"),
    (user([{"type": "input_text"}]), "input.1.content.0.text"),
    (user([{"type": "input_text", "text": "a"}, {"type": "input_file"}]), "input.1.content.1.type"),
    (user([{"type": {}}]), "input.1.content.0.type"),
    (user([{"type": "input_image", "file_id": "a"}]), "input.1.content.0.image_url"),
    ({**SAID, "content": [{"type": "input_image", "image_url": PIXEL}]}, "input.1.content"),
    ({**SAID, "content": None}, "input.1.content"), ({**SAID, "content": [{"type": "refusal"}]},
     "input.1.content.0.refusal"),
    ({**CALL, "arguments": {}}, "input.1.arguments"), ({**CALL, "call_id": None}, "input.1.call_id"),
    ({**CALL, "name": 5}, "input.1.name"), ({**CALL, "namespace": 5}, "input.1.namespace"),
    ({"type": "custom_tool_call", "call_id": "a", "name": "b"}, "input.1.input"),
    ({**OUTPUT, "output": None}, "input.1.output"), ({**OUTPUT, "call_id": 5}, "input.1.call_id"),
    ({**OUTPUT, "output": [{"type": "output_audio"}]}, "input.1.output.0.type"),
    ({**THOUGHT, "content": "Hm."}, "input.1.content"), ({**THOUGHT, "content": [5]}, "input.1.content.0"),
    ({**THOUGHT, "content": [{"type": "output_text", "text": "a"}]}, "input.1.content.0.type"),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": 5}]}, "input.1.summary.0.text"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "place"), WRONG, ids=str)
def test_a_wrong_item_is_refused_at_its_place(item, place):
    with pytest.raises(BadField) as told:
        messages(user("a"), item)
    assert told.value.param == place and told.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(("param", "place"), [
    ("messages", "input"), ("messages.0", "instructions"), ("messages.0.content", "instructions"),
    ("messages.1.content", "input.0.content"), ("messages.1.content.0.image_url.url", "input.0.content.0.image_url"),
    ("messages.1.role", "input.0.role"), ("messages.2.tool_calls.0.function.arguments", "input.3.arguments"),
    ("messages.2.tool_calls.1.function.arguments", "input.4.arguments"), ("messages.2.reasoning_content", "input.1"),
    ("messages.3.tool_call_id", "input.5.call_id"), ("messages.3.content", "input.5.output"),
    ("messages.9.content", "input.9.content"), ("max_tokens", "max_output_tokens"),
    ("response_format", "response_format"),
    ("top_p", "top_p"), ("session_params.rid", "session_params.rid"),
])  # fmt: skip
def test_errors_of_the_chat_name_the_places_of_the_request(param, place):
    places = Places()
    read_input([user("a"), THOUGHT, SAID, CALL, CALL, OUTPUT], "Be brief.", places)
    assert places.renamed(before := HttpError(400, "x", param=param)) is before
    places.is_translated = True
    error = places.renamed(HttpError(409, f"{param}: is wrong", param=param, code="busy"))
    assert (error.status, error.param, error.message, error.code) == (409, place, f"{place}: is wrong", "busy")


def test_errors_name_the_items_of_several_answers():
    places = Places()
    read_input([user("a"), {**SAID, "id": "msg_a_0"}, {**CALL, "id": "fc_b_0"}], None, places)
    places.is_translated = True
    assert places.of("messages.1.content") == "input.1"
    assert places.of("messages.2.tool_calls.0.function.arguments") == "input.2.arguments"


def test_an_error_without_a_field_stays_as_it_is_and_messages_name_fields_of_the_request():
    assert Places().renamed(error := HttpError(503, "full")) is error
    places = Places()
    places.is_translated = True
    places.names["response_format"] = "text.format"
    error = places.renamed(BadField("tools", "and response_format: only one grammar"))
    assert error.message == "tools: and text.format: only one grammar"
