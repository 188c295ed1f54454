"""Tests of requests that are refused: each error names the field as the client sent it, and none is ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.integration.http.generation.encoding import QUICK_COST, Encoder
from lockstep.tests.integration.http.responses.conftest import CONTEXT, Served

REFUSED = [
    ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"), ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"), ({"max_tool_calls": 1}, "max_tool_calls"), ({"n": 2}, "n"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"), ({"moderation": {}}, "moderation"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"), ({"tools": [{"type": "mcp"}]}, "tools.0"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0"), ({"messages": []}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}}, "text.format"),
    ({"reasoning_effort": "low"}, "reasoning_effort"), ({"input_ids": [1]}, "input_ids"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"), ({"include": ["all"]}, "include"),
    ({"functions": [{}]}, "functions"), ({"model": "other"}, "model"),
]  # fmt: skip
WRONG = [
    ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": {}}, "input"), ({"input": []}, "input"),
    ({"input": [[]]}, "input.0"), ({"input": [{"role": "nobody", "content": "a"}]}, "input.0.role"),
    ({"instructions": 5}, "instructions"), ({"instructions": []}, "instructions"),
    ({"max_output_tokens": "many"}, "max_output_tokens"), ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"), ({"temperature": -1}, "temperature"),
    ({"temperature": {}}, "temperature"), ({"top_p": 5}, "top_p"), ({"stream": 5}, "stream"),
    ({"include": "all"}, "include"), ({"include": [5]}, "include.0"), ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 10**6, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"tools": 5}, "tools"), ({"tools": [5]}, "tools.0"), ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools"), ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": 5}, "text"), ({"text": {"format": 5}}, "text.format"), ({"text": {"format": {"type": 5}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"), ({"reasoning": 5}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"), ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": []}, "metadata"), ({"previous_response_id": 5}, "previous_response_id"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls"), ({"rid": {}}, "rid"), ({"request_id": []}, "request_id"),
    ({"session_params": 5}, "session_params"), ({"session_params": {"id": []}, "previous_response_id": "a"},
     "session_params.id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]}, "input.0.arguments"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png"}]}]},
     "input.0.content.0.image_url"),
    ({"response_format": 5}, "response_format"), ({"seed": "x"}, "seed"), ({"logprobs": {}}, "logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "place"), [*REFUSED, *WRONG], ids=str)
def test_the_error_of_a_wrong_field_names_it(served: Served, fields, place):
    told = served.error(404 if place == "model" else 400, **fields)
    assert told["param"] == place and told["message"], told
    streamed = served.error(404 if place == "model" else 400, **{"stream": True, **fields})
    assert streamed["param"] == place


@pytest.mark.parametrize("fields", [
    {"store": True}, {"user": "a"}, {"service_tier": "flex"}, {"safety_identifier": "a"}, {"prompt_cache_key": "a"},
    {"prompt_cache_retention": "24h"}, {"stream_options": {"include_obfuscation": False}}, {"background": False},
    {"truncation": "disabled"}, {"include": ["reasoning.encrypted_content"]}, {"reasoning": {"summary": "auto"}},
    {"client_metadata": {"a": 5}}, {"metadata": None}, {"tools": []}, {"tool_choice": "none"}, {"n": 1},
    {"text": {"format": {"type": "text"}}}, {"text": {}}, {"reasoning": {}}, {"instructions": ""},
], ids=str)  # fmt: skip
def test_what_changes_nothing_is_taken(served: Served, fields):
    plain, answer = served.ok(), served.ok(**fields)
    if "instructions" not in fields:
        assert answer["output"][0]["content"] == plain["output"][0]["content"]


def nested(depth: int) -> Any:
    found: Any = "a"
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("depth", [50, 900, 5000])
def test_deep_nesting_is_an_error_of_the_request(served: Served, depth):
    for body in ({"input": nested(depth)}, {"input": [{"role": "user", "content": nested(depth)}]},
                 {"input": "a", "metadata": nested(depth)}, {"input": "a", "tools": nested(depth)},
                 {"input": "a", "text": {"format": nested(depth)}}, {"input": "a", "tool_choice": nested(depth)},
                 {"input": [{"type": "reasoning", "content": nested(depth)}]}):  # fmt: skip
        text = json.dumps(body) if depth < 900 else _deep(body)
        answer = served.http.post("/v1/responses", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
    arguments = "[" * depth + "]" * depth
    call = {"type": "function_call", "call_id": "a", "name": "b", "arguments": arguments}
    answer = served.http.post("/v1/responses", json={"input": [call], "max_output_tokens": 1})
    assert answer.status_code in (200, 400)


def _deep(body: Any) -> str:
    """Return the JSON of a body, which json cannot write where it is too deep."""
    marked, depth = json.loads(json.dumps(_shallow(body, found := []))), found[0]
    return json.dumps(marked).replace('"@"', "[" * depth + '"a"' + "]" * depth)


def _shallow(value: Any, found: list[int]) -> Any:
    if isinstance(value, dict):
        return {name: _shallow(one, found) for name, one in value.items()}
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        depth = 0
        while isinstance(value, list):
            value, depth = value[0], depth + 1
        found.append(depth)
        return "@"
    return [_shallow(one, found) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("body", "place"), [
    ({"input": [{"role": "user", "content": ""}] * 200_000}, "input"),
    ({"input": "a" * 10_000_000}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 200_000}]}, "input"),
    ({"input": "a", "instructions": "b" * 10_000_000}, "input"),
    ({"input": "a", "tools": [{"type": "function", "name": "f"}] * 10_000}, "tools"),
    ({"input": "a " * CONTEXT}, "input"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_too_long_is_refused(served: Served, body, place):
    told = served.error(**body)
    assert told["param"] == place, told["message"][:300]


def test_a_prompt_that_is_too_long_has_openais_code(served: Served):
    for fields in ({}, {"stream": True}, {"instructions": "Be brief."}):
        told = served.error(input="a " * CONTEXT, **fields)
        assert (told["param"], told["code"]) == ("input", "context_length_exceeded")


def test_a_body_of_too_many_lists_is_refused_before_it_is_read(served: Served):
    told = served.error(413, input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 300_000}])
    assert "max_body_lists" in told["message"]


LONG = "a" * 2_000_000
FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
TOOL = {"type": "function", "name": "now"}
TOO_LONG = [
    ({"metadata": {str(at): "a" for at in range(17)}}, "metadata"), ({"metadata": {"a" * 65: ""}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"), ({"user": "a" * 1025}, "user"), ({"user": LONG}, "user"),
    ({"prompt_cache_key": LONG}, "prompt_cache_key"), ({"safety_identifier": LONG}, "safety_identifier"),
    ({"reasoning": {"effort": LONG}}, "reasoning.effort"), ({"tools": [{**TOOL, "more": LONG}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "a", "description": LONG, "tools": [TOOL]}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {**TOOL, "more": LONG}}, "tool_choice"),
    ({"text": {"format": {**FORMAT, "description": LONG}}}, "text.format"),
    ({"text": {"format": {"type": "text", "more": LONG}}}, "text.format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "place"), TOO_LONG, ids=lambda value: str(value)[:40])
def test_what_the_answer_repeats_has_limits(served: Served, fields, place):
    assert served.error(**fields)["param"] == served.error(**fields, stream=True)["param"] == place


def test_what_is_as_long_as_may_be_is_repeated(served: Served):
    fields = {
        "metadata": {f"{at:064}": "a" * 512 for at in range(16)}, "user": "ü" * 1024, "prompt_cache_key": "b" * 1024,
        "tools": [{**TOOL, "more": "a" * 200_000}], "tool_choice": {**TOOL, "more": "a" * 200_000},
    }  # fmt: skip
    answer = served.ok(max_output_tokens=100, **fields)
    assert {name: answer[name] for name in fields} == fields


@pytest.mark.parametrize("fields", [
    {"tools": [{**TOOL, "more": "a" * 50_000}]}, {"text": {"format": {"type": "text", "more": "a" * 50_000}}},
    {"tools": [TOOL], "tool_choice": {**TOOL, "more": "a" * 50_000}},
], ids=str)  # fmt: skip
def test_what_repeats_much_is_not_encoded_on_the_event_loop(served: Served, monkeypatch, fields):
    costs, run = [], Encoder.run

    async def noted(encoder: Encoder, make: Callable[[], bytes], cost: int) -> bytes:
        costs.append(cost)
        return await run(encoder, make, cost)

    monkeypatch.setattr(Encoder, "run", noted)
    served.ok(max_output_tokens=100, **fields)
    [whole] = costs
    costs.clear()
    served.http.post("/v1/responses", json={"input": "a", "stream": True, "max_output_tokens": 100, **fields}).read()
    assert min(whole, costs[0], costs[-1]) > QUICK_COST > costs[1]


@pytest.mark.parametrize("depth", [30, 450, 960, 970, 975, 980, 985])
def test_what_the_answer_repeats_may_be_deep_or_is_refused(served: Served, depth):
    for fields in ({"tools": [{**TOOL, "more": 0}]}, {"tools": [TOOL], "tool_choice": {**TOOL, "more": 0}},
                   {"text": {"format": {"type": "text", "more": 0}}}):  # fmt: skip
        for more in ({}, {"stream": True}):
            body = {"input": "a", "max_output_tokens": 20, **fields, **more}
            text = json.dumps(body).replace('"more": 0', f'"more": {"[" * depth}{"]" * depth}')
            answer = served.http.post("/v1/responses", content=text, headers={"content-type": "application/json"})
            assert answer.status_code == (200 if depth < 500 else 400), answer.text[-300:]
            assert '"error":null' in answer.text or depth > 500
