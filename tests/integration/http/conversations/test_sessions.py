"""Tests of sessions over a socket: token ids and chats, streams, the cache, pins, limits and errors."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import route_in_background
from lockstep.tests.integration.http.conversations.conftest import BLOCK, Served, make_service
from lockstep.tests.support.callers import held_between_steps, soon, submit

IDS = [5, 6, 7, 300, 301]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def events(served: Served, path: str, **body: object) -> list[Any]:
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chunks_of(choice: Any) -> list[int]:
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


# -- token ids ------------------------------------------------------------------------------------------------------


def test_a_turn_of_token_ids_goes_on_from_the_one_before(served):
    id = served.open(capacity_of_str_len=1000)
    assert isinstance(id, str)
    first = served.generate(id, IDS)
    history = IDS + first["output_ids"]
    second = served.generate(id, [9, 10])
    assert second["prompt_token_ids"] == [*history, 9, 10]
    assert second["meta_info"]["session"] == {
        "id": id, "rid": second["meta_info"]["id"], "parent_rid": first["meta_info"]["id"],
        "num_history_tokens": len(history)}  # fmt: skip
    alone = served.ok("/generate", input_ids=[*history, 9, 10], sampling_params={
        "max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0})  # fmt: skip
    again = served.generate(id, [9, 10], session={"rid": first["meta_info"]["id"]}, params={"temperature": 0.0})
    assert again["output_ids"] == alone["output_ids"]
    assert served.post("/close_session", session_id=id).status_code == 200


def test_clients_of_sglang_go_back_to_a_turn_and_replace_what_follows(served):
    """The steps of SGLang's own use: each turn names the one before it, cuts its last token and replaces."""
    id, rid, history = served.open(capacity_of_str_len=1000), None, []
    rids = []
    for number, ids in enumerate(([5, 6, 7], [8, 9], [10], [11, 12])):
        params = {"rid": rid, "offset": -1, "replace": True} if number else {"rid": None, "replace": True}
        answer = served.generate(id, ids, session=params, return_logprob=True)
        assert answer["prompt_token_ids"] == history[:-1] + ids
        history = answer["prompt_token_ids"] + answer["output_ids"]
        rids.append(rid := answer["meta_info"]["id"])
    back = served.generate(id, [11], session={"rid": rids[0], "replace": True})
    assert back["prompt_token_ids"][:3] == [5, 6, 7] and len(back["prompt_token_ids"]) == 3 + 8 + 1
    told = served.error("/generate", 400, input_ids=[1], session_params={"id": id, "rid": rids[2], "replace": True})
    assert told["param"] == "session_params.rid"


def test_a_text_after_the_first_turn_gets_no_special_tokens_of_its_own(served, service):
    id = served.open()
    body = {"sampling_params": {"max_new_tokens": 4}, "session_params": {"id": id}, "return_prompt_token_ids": True}
    first = served.ok("/generate", text="hello", **body)
    second = served.ok("/generate", text=" the number", **body)
    added = service.engine.tokenizer(" the number", add_special_tokens=False)["input_ids"]
    assert second["prompt_token_ids"] == first["prompt_token_ids"] + first["output_ids"] + added


def test_a_stream_is_a_turn_when_it_has_ended(served):
    id = served.open()
    body = {"sampling_params": {"max_new_tokens": 6, "ignore_eos": True}, "session_params": {"id": id}}
    last = events(served, "/generate", input_ids=IDS, **body)[-1]
    assert last["meta_info"]["session"]["rid"] == last["meta_info"]["id"]
    second = served.generate(id, [9])
    assert second["prompt_token_ids"] == IDS + last["output_ids"] + [9]


def test_versions_of_each_turns_tokens_are_reported(served, service):
    id = served.open()
    first = served.generate(id, IDS)
    version = service.engine.weight_version
    assert served.post("/update_weight_version", new_version="another", abort_all_requests=False).status_code == 200
    second = served.generate(id, [9])
    info = served.client.get("/session_info", params={"session_id": id}).json()
    start, middle = len(IDS), len(IDS) + 8
    assert info["token_ids"] == second["prompt_token_ids"] + second["output_ids"]
    assert [(s["start"], s["end"], s["version"]) for s in info["sampled"]] == [
        (start, middle, version), (middle + 1, middle + 9, "another")]  # fmt: skip
    assert [one["rid"] for one in info["turns"]] == [first["meta_info"]["id"], second["meta_info"]["id"]]
    assert info["messages"] is None and info["num_turns"] == 2
    first_info = served.client.get("/session_info", params={"session_id": id, "rid": first["meta_info"]["id"]}).json()
    assert first_info["token_ids"] == IDS + first["output_ids"]
    assert served.client.get("/session_info", params={"session_id": id, "rid": "no"}).status_code == 400
    assert served.client.get("/session_info").status_code == 404


# -- chats ----------------------------------------------------------------------------------------------------------


def test_a_chat_goes_on_from_new_messages_or_from_all(served, service):
    id = served.open()
    first = served.chat(id, [user("hello")])
    [choice] = first["choices"]
    assert first["session"] == {"id": id, "rid": first["id"], "parent_rid": None, "num_history_tokens": 0,
                                "template_differs_at": None}  # fmt: skip
    new = served.chat(id, [user("and the town?")], {"rid": first["id"]})
    told = [user("hello"), choice["message"], user("and the town?")]
    whole = served.chat(id, told, {"rid": first["id"]})
    assert chunks_of(new["choices"][0]) == chunks_of(whole["choices"][0])
    history = chunks_of(choice)
    assert new["choices"][0]["prompt_token_ids"][: len(history)] == history
    assert new["session"]["num_history_tokens"] == len(history)
    added = service.engine.tokenizer.decode(new["choices"][0]["prompt_token_ids"][len(history) :])
    assert added.removeprefix("<|im_end|>") == "\n<|im_start|>user\nand the town?<|im_end|>\n<|im_start|>assistant\n"
    info = served.client.get("/session_info", params={"session_id": id}).json()
    assert [m["role"] for m in info["messages"]] == ["user", "assistant", "user", "assistant"]
    assert info["messages"][:3] == told


def test_a_streamed_chat_is_a_turn_with_its_session_in_the_last_chunk(served):
    id = served.open()
    body = {"max_tokens": 8, "seed": 1, "return_token_ids": True, "session_params": {"id": id}}
    got = events(served, "/v1/chat/completions", messages=[user("hello")], **body)
    told = [event["session"] for event in got if "session" in event]
    assert len(told) == 1 and got[-1].get("session") == told[0]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in got)
    ids = [id for event in got[1:] for id in event["choices"][0].get("token_ids", ())]
    again = served.chat(id, [user("hello"), {"role": "assistant", "content": text}, user("so?")])
    prompt = again["choices"][0]["prompt_token_ids"]
    first = got[0]["choices"][0]["prompt_token_ids"]
    assert prompt[: len(first) + len(ids)] == first + ids


def test_a_chat_may_be_token_ids_under_two_names(served):
    body = {"max_tokens": 4, "seed": 3, "return_token_ids": True}
    one = served.ok("/v1/chat/completions", prompt_token_ids=IDS, **body)
    other = served.ok("/v1/chat/completions", input_ids=IDS, **body)
    assert chunks_of(one["choices"][0]) == chunks_of(other["choices"][0])
    assert one["choices"][0]["prompt_token_ids"] == IDS
    for wrong in ({"input_ids": IDS}, {"messages": [user("a")]}):
        error = served.error("/v1/chat/completions", 400, prompt_token_ids=IDS, **wrong)
        assert "exactly one of messages, input_ids and prompt_token_ids" in error["message"]
    id = served.open()
    first = served.ok("/v1/chat/completions", prompt_token_ids=IDS, session_params={"id": id}, **body)
    second = served.ok("/v1/chat/completions", prompt_token_ids=[9], session_params={"id": id}, **body)
    assert second["choices"][0]["prompt_token_ids"] == [*chunks_of(first["choices"][0]), 9]
    error = served.error("/v1/chat/completions", 400, messages=[user("a")], session_params={"id": id})
    assert error["param"] == "messages" and "token ids" in error["message"]


def test_a_branch_and_the_message_that_differs(served):
    id = served.open()
    first = served.chat(id, [user("hello")])
    served.chat(id, [user("one")])
    told = [user("hello"), first["choices"][0]["message"], user("two")]
    error = served.error("/v1/chat/completions", 400, messages=told, session_params={"id": id})
    assert error["param"] == "messages.2"
    branch = served.chat(id, told, {"branch": True})
    assert branch["session"]["parent_rid"] == first["id"]


def test_the_template_may_win_and_keeps_the_equal_beginning(served, service):
    found = {}
    for policy in ("sampled", "template"):
        id = served.open(history=policy)
        first = served.chat(id, [user("hello")], regex="<think>\nx\n</think>\n\nyes", max_tokens=40)
        [choice] = first["choices"]
        assert (choice["message"]["reasoning_content"].strip(), choice["message"]["content"].strip()) == ("x", "yes")
        found[policy] = served.chat(id, [user("so?")]), chunks_of(choice)
    second, history = found["sampled"]
    text = service.engine.tokenizer.decode(second["choices"][0]["prompt_token_ids"])
    assert second["choices"][0]["prompt_token_ids"][: len(history)] == history and "</think>" in text
    differs_at = second["session"]["template_differs_at"]
    dropped = service.engine.tokenizer.decode(history[differs_at:])
    assert dropped.startswith("<think>\nx"), "the template drops thoughts before the last question"
    other, history = found["template"]
    text = service.engine.tokenizer.decode(other["choices"][0]["prompt_token_ids"])
    assert "</think>" not in text and other["session"]["num_history_tokens"] == differs_at
    assert other["session"]["template_differs_at"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "session_params"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"session_params": {"id": "x", "offset": 1, "open": True}}, "session_params.offset"),
        ({"session_params": {"id": "x", "drop_previous_output": True, "open": True}},
         "session_params.drop_previous_output"),
        ({"session_params": "x"}, "session_params"),
        ({"session_params": {"id": "x", "depth": 1}}, "session_params"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_what_a_session_of_chats_cannot_do_is_named(served, fields, param):
    id = served.open()
    body = {"messages": [user("hello")], "session_params": {"id": id}, **fields}
    assert served.error("/v1/chat/completions", 400, **body)["param"] == param
    assert served.client.get("/session_info", params={"session_id": id}).json()["num_open_requests"] == 0


def test_a_session_takes_one_prompt_with_one_answer(served):
    id, params = served.open(), {"max_new_tokens": 1}
    for body in ({"input_ids": [IDS, IDS]}, {"input_ids": IDS, "sampling_params": {"n": 2}},
                 {"text": ["a", "b"]}, {"input_ids": IDS, "session_params": [{"id": id}]}):  # fmt: skip
        error = served.error("/generate", 400, **{"sampling_params": params, "session_params": {"id": id}, **body})
        assert error["param"] == "session_params"
    for body in ({"prompt": [IDS, IDS]}, {"prompt": IDS, "n": 2}):
        assert served.error("/v1/completions", 400, session_params={"id": id}, **body)["param"] == "session_params"
    body = {"input_ids": IDS, "output_ids": [[1]], "seeds": [1], "session_params": {"id": id}}
    assert served.error("/renew", 400, **body)["param"] == "session_params"


def test_a_conversation_that_is_too_long_is_refused_and_stays(served):
    id = served.open()
    served.generate(id, [7] * 3000)
    error = served.error("/generate", 400, input_ids=[7] * 3000, session_params={"id": id})
    assert "exceeds the maximum" in error["message"] and "6008 tokens" in error["message"]
    assert len(served.generate(id, [7])["prompt_token_ids"]) == 3009


# -- ends -----------------------------------------------------------------------------------------------------------


def test_a_session_that_is_no_more_is_an_error_that_says_so(serve):
    served = serve(session_idle_s=0.2)
    gone, old = served.open(session_id="gone"), served.open()
    served.ok("/close_session", session_id=gone)
    threading.Event().wait(0.3)
    for id, code in (("never", "session_unknown"), (gone, "session_closed"), (old, "session_expired")):
        for path, body in (("/generate", {"input_ids": IDS}), ("/v1/chat/completions", {"messages": [user("a")]})):
            error = served.error(path, 404, session_params={"id": id}, **body)
            assert (error["code"], error["param"]) == (code, "session_params.id")
        assert served.error("/close_session", 404, session_id=id)["code"] == code
    assert served.client.get("/state").json()["conversations"]["num_expired"] == 1


def test_a_request_opens_its_session_where_it_says_so(served):
    first = served.generate("my own", IDS, session={"open": True})
    assert served.generate("my own", [9], session={"open": True})["prompt_token_ids"][: len(IDS) + 8] == (
        IDS + first["output_ids"]
    )
    assert served.error("/open_session", 400, session_id="my own")["param"] == "session_id"
    served.ok("/close_session", session_id="my own")


def test_limits_of_number_and_bytes_are_named(serve):
    served = serve(max_sessions=2, max_session_bytes=30_000)
    ids = [served.open(), served.open()]
    assert "max_sessions" in served.error("/open_session", 503)["message"]
    served.generate(ids[1], IDS)
    served.generate(ids[0], [7] * 3900)
    error = served.error("/generate", 503, input_ids=[7] * 3000, session_params={"id": ids[1]})
    assert "max_session_bytes" in error["message"]
    served.generate(ids[1], IDS)
    served.ok("/close_session", session_id=ids[0])
    served.generate(ids[1], [7] * 3000)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"capacity_of_str_len": -1}, "capacity_of_str_len"),
        ({"capacity_of_str_len": "many"}, "capacity_of_str_len"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"history": "mine"}, "history"),
        ({"streaming": "perhaps"}, "streaming"),
    ],
)
def test_wrong_fields_of_a_new_session_are_named(served, body, param):
    assert served.error("/open_session", 400, **body)["param"] == param


def test_state_and_metrics_count_sessions(serve):
    served = serve()
    id = served.open()
    served.generate(id, IDS)
    counted = served.client.get("/state").json()["conversations"]
    assert (counted["num_open"], counted["num_turns"], counted["num_open_requests"]) == (1, 1, 0)
    assert counted["num_bytes"] == served.client.get("/session_info", params={"session_id": id}).json()["num_bytes"]
    served.ok("/close_session", session_id=id)
    text = served.client.get("/metrics").text
    lines = {
        line.partition("{")[0]: line.rpartition(" ")[2] for line in text.splitlines() if "lockstep:session" in line
    }
    assert (lines["lockstep:sessions_open"], lines["lockstep:session_bytes"]) == ("0.0", "0.0")
    assert lines["lockstep:sessions_opened_total"] == "1.0"


# -- requests at a time, and ends of requests -----------------------------------------------------------------------


def test_two_requests_on_a_session_each_go_on_from_their_turn(served):
    id = served.open()
    first = served.generate(id, IDS)
    with held_between_steps(served.service.engine):
        waiting = [submit(served.generate, id, [number], session={"rid": first["meta_info"]["id"]})
                   for number in (20, 21)]  # fmt: skip
    answers = [soon(one) for one in waiting]
    history = IDS + first["output_ids"]
    assert [answer["prompt_token_ids"] for answer in answers] == [[*history, 20], [*history, 21]]
    info = served.client.get("/session_info", params={"session_id": id}).json()
    assert info["last_rid"] == info["turns"][-1]["rid"] in {answer["meta_info"]["id"] for answer in answers}


def test_a_streaming_session_refuses_a_second_request_at_a_time(served, until):
    id = served.open(streaming=True)
    with held_between_steps(served.service.engine):
        waiting = submit(served.generate, id, IDS)
        until(lambda: served.client.get("/session_info", params={"session_id": id}).json()["num_open_requests"])
        error = served.error("/generate", 409, input_ids=[9], session_params={"id": id})
        assert error["code"] == "session_busy"
    first = soon(waiting)
    assert served.generate(id, [9])["prompt_token_ids"] == [*IDS, *first["output_ids"], 9]


def test_an_aborted_answer_is_a_turn_with_the_tokens_that_it_has(served, until):
    id = served.open()
    waiting = submit(served.generate, id, IDS, 4000)
    until(lambda: served.service.engine.num_running)
    served.ok("/abort_request", abort_all=True)
    first = soon(waiting)
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    second = served.generate(id, [9])
    assert second["prompt_token_ids"] == [*IDS, *first["output_ids"], 9]


def test_a_client_that_leaves_makes_no_turn(served, until):
    id = served.open()
    first = served.generate(id, IDS)
    body = {"input_ids": [9], "session_params": {"id": id}, "stream": True,
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}  # fmt: skip
    with served.client.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_bytes())

    def info() -> Any:
        return served.client.get("/session_info", params={"session_id": id}).json()

    until(lambda: not info()["num_open_requests"])
    assert info()["num_turns"] == 1
    assert served.generate(id, [9])["prompt_token_ids"] == [*IDS, *first["output_ids"], 9]


# -- the cache ------------------------------------------------------------------------------------------------------


def whole_blocks(num_tokens: int) -> int:
    """Return the tokens in all whole blocks of a history but at most the last."""
    return max(num_tokens // BLOCK - 1, 0) * BLOCK


@pytest.mark.parametrize("end", ["length", "abort", "retract"])
def test_a_turn_finds_the_whole_blocks_of_its_history_in_the_cache(served, until, end):
    assert served.post("/flush_cache").status_code == 200
    id = served.open()
    prompt = [(7 * i) % 300 for i in range(50)]
    if end == "length":
        first = served.generate(id, prompt, 61)
    else:
        waiting = submit(served.generate, id, prompt, 4000 if end == "abort" else 300)
        until(lambda: any(view.num_output_tokens > 50 for view in served.service.engine.live_sequences()))
        if end == "abort":
            served.ok("/abort_request", abort_all=True)
        else:
            served.ok("/pause_generation", mode="retract")
            served.ok("/continue_generation")
        first = soon(waiting)
        assert (first["meta_info"]["num_retractions"] > 0) == (end == "retract")
    for _ in range(3):
        history = served.client.get("/session_info", params={"session_id": id}).json()["token_ids"]
        answer = served.generate(id, [9, 10], 17)
        cached = answer["meta_info"]["cached_tokens"]
        assert whole_blocks(len(history)) <= cached <= len(history), (end, len(history), cached)
    chat = served.open()
    first = served.chat(chat, [user("hello " * 30)], max_tokens=40)
    history = chunks_of(first["choices"][0])
    second = served.chat(chat, [user("so?")])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole_blocks(len(history))


def test_a_session_pins_its_last_turn_until_it_is_closed(served, until):
    engine = served.service.engine
    assert served.post("/flush_cache").status_code == 200
    id = served.open(pin=True)

    def pinned() -> int:
        return served.client.get("/session_info", params={"session_id": id}).json()["num_pinned_blocks"]

    served.generate(id, [(3 * i) % 300 for i in range(60)], 10)
    until(lambda: pinned() == 69 // BLOCK)
    served.generate(id, [9], 40)
    until(lambda: pinned() == 109 // BLOCK)
    until(lambda: engine.state()["num_pinned_blocks"] == 109 // BLOCK)
    served.ok("/close_session", session_id=id)
    until(lambda: engine.state()["num_pinned_blocks"] == 0)
    engine.check_integrity()


def test_pins_end_with_the_weights_and_come_again_with_the_next_turn(served, until):
    engine, id = served.service.engine, served.open(pin=True)
    first = served.generate(id, [(5 * i) % 300 for i in range(60)], 10)
    until(lambda: engine.state()["num_pinned_blocks"])
    assert served.post("/flush_cache").status_code == 200
    assert engine.state()["num_pinned_blocks"] == 0
    second = served.generate(id, [9], 10)
    assert second["prompt_token_ids"][60:70] == first["output_ids"], "the tokens stay"
    until(lambda: engine.state()["num_pinned_blocks"])
    served.ok("/close_session", session_id=id)
    until(lambda: engine.state()["num_pinned_blocks"] == 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_turn_that_called_a_tool_goes_on_with_the_message_that_the_client_got(served, is_streamed):
    id = served.open()
    town = {"type": "object", "properties": {"town": {"enum": ["città"]}}, "required": ["town"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": town}}]
    body = {"messages": [user("hello")], "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
            "session_params": {"id": id}, "max_tokens": 100, "seed": 1, "return_token_ids": True}  # fmt: skip
    if is_streamed:
        chunks = events(served, "/v1/chat/completions", **body)
        message: dict[str, object] = {"role": "assistant", "content": None}
        calls = [delta for chunk in chunks for choice in chunk["choices"]
                 for delta in choice["delta"].get("tool_calls") or ()]  # fmt: skip
        assert [one["index"] for one in calls] == [0, 0]
        arguments = "".join(one["function"]["arguments"] for one in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    else:
        [choice] = served.ok("/v1/chat/completions", **body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
    [call] = message["tool_calls"]  # type: ignore[misc]
    reply = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    second = served.chat(id, [user("hello"), message, reply], tools=tools)
    info = served.client.get("/session_info", params={"session_id": id}).json()
    assert second["session"]["num_history_tokens"] > 0 and info["num_turns"] == 2
    other = {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": '{"town": "a"}'}}]}
    error = served.error("/v1/chat/completions", 400, messages=[user("hello"), other, reply], tools=tools,
                         session_params={"id": id, "rid": second["session"]["parent_rid"]})  # fmt: skip
    assert error["param"] == "messages.1"


def test_a_pinned_session_outlives_a_flood_that_takes_another_ones_blocks(until):
    service, prompt = make_service("chatml", kv_cache="64 blocks"), [(11 * i) % 300 for i in range(100)]
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        served, engine = Served(service, server, client), service.engine
        kept, lost = served.open(pin=True), served.open()
        served.generate(kept, [1, *prompt], 20)
        served.generate(lost, [2, *prompt], 20)
        until(lambda: engine.state()["num_pinned_blocks"] == 120 // BLOCK)
        for number in range(6):
            served.ok("/generate", input_ids=[10 + number] * 400, sampling_params={"max_new_tokens": 1})
        cached = [served.generate(id, [9], 1)["meta_info"]["cached_tokens"] for id in (kept, lost)]
        assert cached == [120 // BLOCK * BLOCK, 0]


def test_pins_beyond_the_budget_are_refused_and_nothing_waits_for_them(until):
    service = make_service("chatml", kv_cache="64 blocks", pin_budget=0.05)
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        served = Served(service, server, client)
        id = served.open(pin=True)
        served.generate(id, [7] * 200, 8)
        until(lambda: service.engine.state()["num_pinned_blocks"] == 64 // 20)
        assert len(served.generate(id, [9], 1)["prompt_token_ids"]) == 209
        service.engine.check_integrity()


def test_a_session_through_a_router_is_the_workers_and_is_lost_with_it(serve, tmp_path, until):
    worker = serve()
    config = RouterConfig(
        (worker.server.url,), HttpConfig(port=0), journal=tmp_path / "journal", health_interval_s=0.05
    )
    router = route_in_background(config)
    try:
        with httpx.Client(base_url=router.url, timeout=60) as client:
            served = Served(worker.service, worker.server, client)
            until(lambda: client.get("/ready").status_code == 200)
            id = served.open(session_id="mine")
            first = served.chat(id, [user("hello")])
            history = chunks_of(first["choices"][0])
            second = served.chat(id, [user("so?")], stream=False)
            assert second["choices"][0]["prompt_token_ids"][: len(history)] == history
            last = events(served, "/generate", input_ids=[9], session_params={"id": id})[-1]
            assert last["meta_info"]["session"]["num_history_tokens"] == len(chunks_of(second["choices"][0]))
            assert client.get("/session_info", params={"session_id": id}).json()["num_turns"] == 3
            worker.server.close()
            until(lambda: client.get("/ready").status_code == 503)
            assert served.error("/generate", 404, input_ids=[9], session_params={"id": id})["code"] == "session_lost"
    finally:
        router.close()
