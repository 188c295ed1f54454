"""Tests of whole answers over a real socket. The openai package's model checks each of them, see `Served.ok`."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

from lockstep.tests.integration.http.responses.conftest import Served, forced
from lockstep.tests.support.chat.answers import PARIS, SCHEMA, WHOLE
from lockstep.tests.support.chat.tokenizer import chat_template

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"type": "function", "name": "weather", "description": "Forecast.", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": None},
]
INCLUDE = ["message.output_text.logprobs"]


class Forecast(BaseModel):
    """A format of answers."""

    city: Literal["Rome", "Oslo"]
    rain: bool


def test_an_answer_is_that_of_the_same_chat(served: Served):
    asks = {"temperature": 0.7, "top_p": 0.9, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    chat = served.chat(ASK, **asks)
    [choice] = chat["choices"]
    answer = served.ok(**asks)
    [message] = answer["output"]
    [part] = message["content"]
    assert part["text"] == choice["message"]["content"] and part["logprobs"] == []
    for name in ("token_ids", "prompt_token_ids", "finish_reason", "matched_stop", "logprobs"):
        assert answer[name] == choice[name], name
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 16
    assert answer["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
    assert (answer["temperature"], answer["top_p"], answer["top_logprobs"]) == (0.7, 0.9, 2)


def test_texts_have_the_log_probabilities_of_all_sampled_tokens(served: Served):
    chat = served.chat(ASK, logprobs=True, top_logprobs=3)
    answer = served.ok(include=INCLUDE, top_logprobs=3)
    entries = answer["output"][0]["content"][0]["logprobs"]
    theirs = chat["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in entries] == [(one["token"], one["logprob"]) for one in theirs]
    assert all(len(one["top_logprobs"]) == 3 for one in entries) and "logprobs" not in answer
    told = served.error(top_logprobs=3)
    assert told["param"] == "top_logprobs" and INCLUDE[0] in told["message"]


def test_instructions_and_items_make_the_prompt_of_the_chat(served: Served):
    items = [
        *ASK, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12:00"},
    ]  # fmt: skip
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."}, *ASK,
        {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    ]  # fmt: skip
    nested = [{"type": "function", "function": {k: v for k, v in one.items() if k != "type" and v is not None}}
              for one in TOOLS]  # fmt: skip
    answer = served.ok(items, instructions="Be brief.", tools=TOOLS, return_token_ids=True)
    chat = served.chat(messages, tools=nested, return_token_ids=True)
    assert answer["prompt_token_ids"] == chat["choices"][0]["prompt_token_ids"]
    assert answer["token_ids"] == chat["choices"][0]["token_ids"]
    assert answer["instructions"] == "Be brief." and answer["tools"] == TOOLS


def test_thoughts_texts_and_calls_are_items_in_the_order_of_the_answer(served: Served):
    answer = served.ok(tools=TOOLS, max_output_tokens=1000, structured_outputs=forced(WHOLE[0].text))
    thought, message, weather, now = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": WHOLE[0].thought}] and thought["summary"] == []
    assert message["content"][0]["text"] == "I look."
    assert (weather["name"], weather["arguments"]) == PARIS and (now["name"], now["arguments"]) == ("now", "{}")
    assert [one["status"] for one in answer["output"]] == ["completed"] * 4 and answer["status"] == "completed"
    assert len({one["id"] for one in answer["output"]} | {weather["call_id"], now["call_id"]}) == 6
    assert answer["incomplete_details"] is None and answer["finish_reason"] == "tool_calls"
    num_thought = len(served.service.engine.tokenizer(WHOLE[0].thought)["input_ids"])
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == num_thought


def test_ids_follow_from_that_of_the_answer_which_another_server_may_go_on_with(served: Served):
    asks = {"tools": TOOLS, "max_output_tokens": 1000, "structured_outputs": forced(WHOLE[0].text)}
    one, again, other = (served.ok(rid=rid, **asks)["output"] for rid in ("a", "a", "b"))
    assert one == again and {item["id"] for item in one}.isdisjoint(item["id"] for item in other)
    assert one[2]["call_id"] != other[2]["call_id"]


def test_a_text_between_calls_is_an_item_of_its_own(served: Served):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"One.{call}Two.{call}"
    answer = served.ok(tools=TOOLS, max_output_tokens=500, structured_outputs=forced(text), include=INCLUDE)
    kinds = [one["type"] for one in answer["output"]]
    assert kinds == ["message", "function_call", "message", "function_call"]
    first, second = (one["content"][0] for one in answer["output"] if one["type"] == "message")
    assert (first["text"], second["text"]) == ("One.", "Two.")
    assert len(first["logprobs"]) == answer["usage"]["output_tokens"] and second["logprobs"] == []


def test_an_answer_without_a_text_is_an_empty_message(served: Served):
    [message] = served.ok(structured_outputs=forced("<think>"), max_output_tokens=1, stop_token_ids=[300])["output"]
    assert message["content"][0]["text"] in ("", "<think>")


def test_an_answer_that_is_cut_is_incomplete_with_the_reason(served: Served):
    answer = served.ok(max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete" and answer["finish_reason"] == "length"
    cut = served.ok(tools=TOOLS, max_output_tokens=20, structured_outputs=forced(WHOLE[0].text))
    assert [one["type"] for one in cut["output"]] == ["reasoning"] and cut["output"][0]["status"] == "incomplete"


def test_the_clients_metadata_comes_back_and_the_weights_are_named_beside_it(served: Served):
    answer = served.ok(metadata={"weight_version": "mine"}, user="me", prompt_cache_key="key")
    assert answer["metadata"] == {"weight_version": "mine"}
    assert answer["weight_version"] == served.chat(ASK)["metadata"]["weight_version"]
    assert answer["weight_versions"][0]["end"] == 16
    assert (answer["user"], answer["prompt_cache_key"], answer["store"]) == ("me", "key", False)


def test_extras_of_a_chat_are_fields_of_the_response(served: Served):
    asks = {"return_meta_info": True, "return_receipt": "digests", "return_cached_tokens_details": True}
    answer, chat = served.ok(**asks), served.chat(ASK, **asks)
    assert answer["sglext"] == chat["sglext"]
    assert answer["receipt"].keys() == chat["choices"][0]["receipt"].keys()
    assert answer["meta_info"]["output_token_logprobs"] == chat["choices"][0]["meta_info"]["output_token_logprobs"]


def test_cached_tokens_are_counted(served: Served):
    text = "The same long beginning of a conversation. " * 4
    served.ok(text)
    assert served.ok(text)["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_custom_tools_and_those_of_namespaces_are_called_by_their_own_names(served: Served):
    tools = [
        {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}},
        {"type": "namespace", "name": "clock", "description": "A clock.", "tools": [TOOLS[1]]},
    ]
    calls = [{"name": "patch", "arguments": {"input": "*** ü\n"}}, {"name": "clock__now", "arguments": {}}]
    text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    answer = served.ok(tools=tools, max_output_tokens=500, structured_outputs=forced(text))
    patch, now = answer["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** ü\n")
    assert (now["type"], now["name"], now["namespace"]) == ("function_call", "now", "clock")
    assert answer["tools"] == tools
    outputs = [{"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
               {"type": "function_call_output", "call_id": now["call_id"], "output": "12:00"}]  # fmt: skip
    served.ok([*ASK, *answer["output"], *outputs], tools=tools)


@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "name": "now"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
], ids=str)  # fmt: skip
def test_demanded_calls_are_made(served: Served, choice):
    tools = [TOOLS[0] | {"parameters": {"type": "object", "additionalProperties": False}}, TOOLS[1]]
    tools[1] = {**tools[1], "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    answer = served.ok(tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
    calls = [one for one in answer["output"] if one["type"] == "function_call"]
    assert len(calls) == 1 and (choice == "required" or calls[0]["name"] == "now")
    assert answer["tool_choice"] == choice and answer["parallel_tool_calls"] is False


def test_formats_constrain_the_text(served: Served):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    answer = served.ok(text={"format": format}, max_output_tokens=200, temperature=0)
    assert json.loads(answer["output"][-1]["content"][0]["text"])["a"] in (1, 2) and answer["text"] == {
        "format": format
    }
    served.ok(text={"format": {"type": "text"}, "verbosity": "medium"})
    served.ok(text={"format": {"type": "json_object"}})
    chats_own = {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}
    assert served.ok(response_format=chats_own)["output"][0]["content"][0]["text"] == "abc"


def test_the_client_parses_an_answer_in_the_format_of_a_class(served: Served):
    answer = served.openai.responses.parse(
        model="small", input="Weather?", text_format=Forecast, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Forecast)


def test_the_effort_of_reasoning_goes_to_the_chat_template(served: Served):
    tokenizer = served.service.engine.tokenizer
    assert tokenizer is not None
    before = tokenizer.chat_template
    tokenizer.chat_template = before + "{{ reasoning_effort }}"
    try:
        answer = served.ok(reasoning={"effort": "high", "summary": "auto"}, return_token_ids=True)
    finally:
        tokenizer.chat_template = before
    assert tokenizer.decode(answer["prompt_token_ids"]).endswith("high")
    assert answer["reasoning"] == {"effort": "high", "summary": None}


def test_a_request_names_its_answer(served: Served):
    assert served.ok(rid="mine")["id"] == "mine"
    assert served.ok(request_id="a")["id"] == "resp_a"
    assert served.ok()["id"].startswith("resp_")


def test_answers_are_not_kept_to_be_asked_for(served: Served):
    for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"),
                         ("DELETE", "/v1/responses/resp_1"), ("POST", "/v1/responses/compact")):  # fmt: skip
        answer = served.http.request(method, path)
        assert answer.status_code == 501 and "previous_response_id" in answer.json()["error"]["message"]
    assert served.http.get("/v1/responses").status_code == 405


def test_mistral_ids_stay_short(serve, service):
    case = WHOLE[5]
    tokenizer = service.engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, chat_template("mistral", thinks=True)
    try:
        served = serve(tool_call_parser="mistral", reasoning_parser="mistral")
        answer = served.ok(tools=TOOLS, max_output_tokens=500, structured_outputs=forced(case.text))
    finally:
        tokenizer.chat_template = before
    ids = [one["call_id"] for one in answer["output"] if one["type"] == "function_call"]
    assert len({*ids}) == 2 and all(len(id) == 9 and id.isalnum() for id in ids)
