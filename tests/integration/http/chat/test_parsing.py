"""Tests of /parse_function_call and /separate_reasoning on the answers of the families."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.tests.support.chat.answers import BROKEN, TOOLS, WHOLE, Case
from lockstep.tests.support.chat.serving import Serve, byte_engine, serving
from lockstep.tests.support.chat.tokenizer import chat_template


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    torch.set_num_threads(1)
    with byte_engine() as engine, serving(engine) as serve:
        yield serve


def parsed(url: str, verb: str, **body) -> dict:
    return httpx.post(f"{url}/{verb}", json=body).raise_for_status().json()


@pytest.mark.parametrize(
    "case", [case for case in (*WHOLE, *BROKEN) if case.tools], ids=lambda case: f"{case.tools}: {case.text[:30]!r}"
)
def test_calls_are_found_in_the_form_that_is_named(serve, case: Case):
    url = serve(chat_template("hermes"))
    found = parsed(url, "parse_function_call", text=case.text, tools=TOOLS, tool_call_parser=case.tools)
    if case.reasoning is None:  # else its text is content here, also where it has the markers of a call
        assert [(call["name"], call["parameters"]) for call in found["calls"]] == list(case.calls)
        assert found["normal_text"] == case.content
    assert [call["tool_index"] for call in found["calls"]] == list(range(len(found["calls"])))


@pytest.mark.parametrize(
    "case", {case.tools: case for case in WHOLE if any(name == "now" for name, _ in case.calls)}.values(),
    ids=lambda case: case.tools,
)  # fmt: skip
def test_calls_by_a_long_name_are_found(serve, case: Case):
    name = "now" + "_" * 125
    tools = json.loads(json.dumps(TOOLS).replace('"now"', f'"{name}"'))
    body = {"text": case.text.replace("now", name), "tools": tools, "tool_call_parser": case.tools}
    found = parsed(serve(chat_template("hermes")), "parse_function_call", **body)
    assert name in [call["name"] for call in found["calls"]]


@pytest.mark.parametrize("case", [case for case in WHOLE if case.reasoning and not case.calls], ids=str)
def test_reasoning_is_found_in_the_form_that_is_named(serve, case: Case):
    url = serve(chat_template("hermes"))
    fields = {"text": case.text, "reasoning_parser": case.reasoning, "return_blocks": True}
    found = parsed(url, "separate_reasoning", **fields)
    assert (found["reasoning_text"], found["text"]) == (case.thought, case.content)
    assert "".join(found["reasoning_blocks"]) == case.thought and "".join(found["text_blocks"]) == case.content
    assert [block["text"] for block in found["blocks"]] == [*found["reasoning_blocks"], *found["text_blocks"]]


def test_the_servers_forms_are_taken_where_none_is_named(serve):
    text = '<think>\nHm\n</think>\n\nYes.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    url = serve(chat_template("hermes", thinks=True))
    found = parsed(url, "parse_function_call", text=text, tools=TOOLS)
    assert found["calls"] == [{"tool_index": 0, "name": "now", "parameters": "{}"}]
    assert found["normal_text"] == "<think>\nHm\n</think>\n\nYes.", "reasoning stays in it, with its markers"
    found = parsed(url, "separate_reasoning", text=text)
    assert found == {"reasoning_text": "Hm", "text": text.partition("</think>\n\n")[2]}
    inside = parsed(url, "separate_reasoning", text="Hm\n</think>\n\nYes.", reasoning_parser="deepseek-r1")
    assert inside == {"reasoning_text": "Hm", "text": "Yes."}, "a text that begins inside of it"


@pytest.mark.parametrize(("verb", "body", "field"), [
    ("parse_function_call", {"tools": TOOLS}, "text"),
    ("parse_function_call", {"text": "x", "tools": []}, "tools"),
    ("parse_function_call", {"text": "x", "tools": [5]}, "tools"),
    ("parse_function_call", {"text": "x", "tools": TOOLS, "tool_call_parser": "x"}, "tool_call_parser"),
    ("parse_function_call", {"text": "x", "tools": TOOLS, "tool_call_parser": "none"}, "tool_call_parser"),
    ("separate_reasoning", {"text": 5}, "text"),
    ("separate_reasoning", {"text": "x", "reasoning_parser": "x"}, "reasoning_parser"),
    ("separate_reasoning", {"text": "x", "reasoning_parser": "none"}, "reasoning_parser"),
    ("separate_reasoning", {"text": "x"}, "reasoning_parser"),
])  # fmt: skip
def test_a_wrong_field_is_named(serve, verb, body, field):
    answer = httpx.post(f"{serve(chat_template('hermes'))}/{verb}", json=body)
    assert answer.status_code == 400 and json.loads(answer.text)["param"] == field
