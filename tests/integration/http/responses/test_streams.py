"""Tests of streamed answers: the openai package's clients make of them what the whole answer is."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.http.generation.going_on import Moving
from lockstep.integration.http.generation.limits import RequestLimits
from lockstep.integration.http.responses.api import ResponsesReply
from lockstep.integration.http.responses.places import Places
from lockstep.integration.http.responses.request import ResponsesRequest
from lockstep.integration.http.responses.tools import ToolNames
from lockstep.integration.http.responses.writer import ResponseWriter
from lockstep.tests.integration.http.responses.conftest import PATIENCE, Served, forced, without_ids
from lockstep.tests.integration.http.responses.test_answers import INCLUDE, TOOLS
from lockstep.tests.support.callers import held_steps, soon, submit, while_it_steps
from lockstep.tests.support.chat.answers import BROKEN, WHOLE, Case

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MIXED = Case("hermes", "qwen3", 'A<tool_call>{"name": "now", "arguments": {}}</tool_call>B<think>c</think>D')


def fields_of(case: Case, **others: Any) -> dict[str, Any]:
    extra = {"structured_outputs": forced(case.text), "seed": 3, "return_token_ids": True, "logprobs": True}
    return {"model": "small", "input": "Weather?", "tools": TOOLS, "max_output_tokens": 1000, "include": INCLUDE,
            "top_logprobs": 1, "extra_body": extra, **others}  # fmt: skip


def settings_of(case: Case) -> dict[str, str]:
    return {"tool_call_parser": case.tools or "none", "reasoning_parser": case.reasoning or "none"}


def raw_events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which the openai package's model accepts."""
    with served.http.stream("POST", "/v1/responses", json={"input": "Weather?", "stream": True, **body}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    return events


@pytest.mark.parametrize(
    "case", [*WHOLE, *BROKEN[::4], MIXED], ids=lambda case: f"{case.tools}: {case.text[:30]!r}"
)  # fmt: skip
def test_a_stream_and_the_whole_answer_are_the_same_response(serve, case):
    served = serve(**settings_of(case))
    served.openai.responses.create(**fields_of(case))  # the prompt is cached from now on
    whole = served.openai.responses.create(**fields_of(case))
    with served.openai.responses.stream(**fields_of(case)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert without_ids(final) == without_ids(whole)
    told = raw_events(served, **_body(case))[-1]["response"]
    assert without_ids(told) == without_ids(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [one.type for one in done] == [one["type"] for one in told["output"]]
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert texts == final.output_text == whole.output_text


def _body(case: Case) -> dict[str, Any]:
    fields = fields_of(case)
    return fields | fields.pop("extra_body")


def test_the_asynchronous_client_makes_the_same_response(served: Served):
    async def streamed() -> Any:
        url = f"{served.server.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client,
            client.responses.stream(**fields_of(WHOLE[0])) as stream,
        ):
            return await stream.get_final_response()

    asyncio.run(streamed())  # the prompt is cached from now on
    final = asyncio.run(streamed())
    whole = served.openai.responses.create(**fields_of(WHOLE[0]))
    assert final.output_text == whole.output_text == "I look."
    assert without_ids(final) == without_ids(whole)


def test_events_come_in_openais_order_with_the_places_of_their_items(served: Served):
    events = raw_events(served, **_body(WHOLE[0]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    shown = [kind for at, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[at - 1] != kind]
    part = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert shown == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *ended,
        *part, "output_text.delta", "output_text.done", *ended,
        *call, *call, "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]
            assert "content_index" not in event or event["content_index"] == 0
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == output[event["output_index"]]["id"]
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)


def test_each_token_has_its_log_probability_once_in_the_deltas_of_a_text(served: Served):
    events = raw_events(served, include=INCLUDE, max_output_tokens=30, seed=3)
    deltas = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert deltas == events[-1]["response"]["output"][0]["content"][0]["logprobs"] and len(deltas) == 30


def test_custom_tools_have_events_of_their_own(served: Served):
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    body = {"tools": [{"type": "custom", "name": "patch"}], "structured_outputs": forced(call)}
    events = raw_events(served, max_output_tokens=300, **body)
    [added] = [event for event in events if event["type"] == "response.output_item.added"]
    assert added["item"]["input"] == ""
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == "a\nb" == events[-1]["response"]["output"][0]["input"]


def test_a_stream_that_is_cut_ends_incomplete(served: Served):
    *_, last = raw_events(served, max_output_tokens=3)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    with served.openai.responses.stream(model="small", input="Weather?", max_output_tokens=3) as stream:
        assert list(stream)[-1].type == "response.incomplete"


def test_an_answer_that_is_aborted_is_incomplete_for_no_reason_that_openai_names(served: Served):
    body = {"input": "Weather?", "stream": True, "rid": "long", "ignore_eos": True, "max_output_tokens": 4000}
    with (
        held_steps(served.service.engine) as allowed,
        served.http.stream("POST", "/v1/responses", json=body) as answer,
    ):
        lines = answer.iter_lines()
        allowed.release(50)
        assert any("output_text.delta" in line for line in lines)
        while_it_steps(allowed, served.http.post, "/abort_request", json={"rid": "long"}).raise_for_status()
        *_, last = [line for line in lines if line]
    response = EVENT.validate_python(json.loads(last.removeprefix("data: ")), strict=True).response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", None)
    assert response.finish_reason == "abort" and response.output[0].status == "incomplete"


def a_request() -> ResponsesRequest:
    """Return a request with the fields that writers read."""
    ask = {"id": "resp_1", "created": 1, "model": "m", "repeated": {}, "tool_names": ToolNames(), "places": Places()}
    request = object.__new__(ResponsesRequest)
    for name, value in {**ask, "wants_logprobs": False, "shows_logprobs": False}.items():
        object.__setattr__(request, name, value)
    return request


def test_thoughts_are_counted_while_a_long_text_is_tokenised():
    """Answers are made on the event loop, and the long ones in one thread: none may wait for the prompts of others."""
    begun, may_end = threading.Event(), threading.Event()

    def tokenizer(text: str, **options: object) -> dict[str, list[int]]:
        if text == "long":
            begun.set()
            assert may_end.wait(PATIENCE)
        return {"input_ids": [1] * len(text)}

    engine: Any = SimpleNamespace(tokenizer=tokenizer)
    limits = RequestLimits(engine, HttpConfig(max_tokenising_chars=1))
    long = submit(limits.tokenising.whole, "long", adds_special=False)
    assert begun.wait(PATIENCE)
    writer = ResponsesReply(a_request(), limits, 0.0, moving=Moving(), engine=engine).writer()
    choice = {"delta": {"reasoning_content": "Hm."}, "logprobs": None, "finish_reason": "stop"}
    counts = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10,
              "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    made = submit(lambda: (writer.grow({"choices": [choice]}), writer.grow({"choices": [], "usage": counts})))
    try:
        made.result(timeout=5)
    finally:
        may_end.set()
    assert writer.whole()["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    assert soon(long) == [1] * 4


def test_an_error_within_a_stream_is_an_event_and_the_failed_response():
    request = a_request()
    request.places.is_translated = True
    writer = ResponseWriter(request, len, is_turn=False)
    told = writer.failed(HttpError(400, "messages: too long", param="messages", code="too_long")) + writer.end()
    events = [json.loads(part.split(b"data: ")[1]) for part in told.split(b"\n\n") if part]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "error",
                                                   "response.failed"]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[2]["status"] == 400
    assert (events[2]["param"], events[2]["message"], events[2]["code"]) == ("input", "input: too long", "too_long")
    assert events[3]["response"]["error"] == {"code": "invalid_prompt", "message": "input: too long"}
    assert events[3]["response"]["status"] == "failed"
