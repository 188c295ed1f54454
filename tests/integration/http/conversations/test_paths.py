"""Tests of sessions by path: a client's base URL alone makes its requests turns of a session."""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPConnection
from typing import Any

import pytest

from lockstep.integration.http.edge.session_paths import SessionPaths, path_of, session_in, with_session
from lockstep.tests.integration.http.conversations.conftest import Served
from lockstep.tests.support.callers import held_between_steps, soon, submit

CHAT = "/v1/chat/completions"
IDS = [5, 6, 7, 300, 301]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(served: Served, id: str, *messages: dict[str, Any], **fields: object) -> Any:
    return served.ok(path_of(id, CHAT), messages=[*messages], max_tokens=8, return_token_ids=True, **fields)


def info(served: Served, id: str, **fields: object) -> Any:
    answer = served.client.get("/session_info", params={"session_id": id, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: Any) -> dict[str, Any]:
    return answer["choices"][0]["message"]


def tokens(answer: Any) -> list[int]:
    [choice] = answer["choices"]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


def raw(served: Served, method: str, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, Any]:
    """Send a path as it is, which httpx would write in its normal form."""
    connection = HTTPConnection(served.client.base_url.host, served.client.base_url.port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


# -- turns ----------------------------------------------------------------------------------------------------------


def test_an_agent_that_sends_its_history_has_its_tokens_stand(served):
    first = chat(served, "by path", user("hello"))
    second = chat(served, "by path", user("hello"), said(first), user("so?"))
    assert second["session"]["parent_rid"] == first["id"]
    assert tokens(second)[: len(tokens(first))] == tokens(first)
    found = info(served, "by path")
    assert found["leaves"] == [second["id"]] and found["token_ids"] == tokens(second)
    served.ok("/close_session", session_id="by path")


def test_side_requests_retries_and_a_compaction_are_branches(served):
    id = served.open()
    first = chat(served, id, user("hello"))
    side = chat(served, id, {"role": "system", "content": "a title"}, user("hello"))
    again = chat(served, id, user("hello"), seed=5)
    second = chat(served, id, user("hello"), said(first), user("so?"))
    sibling = chat(served, id, user("hello"), said(first), user("so?"), seed=6)
    behind = chat(served, id, user("hello"), said(first), user("so?"), said(second))
    compact = chat(served, id, user("all so far"), user("so?"))
    parents = [one["session"]["parent_rid"] for one in (first, side, again, second, sibling, behind, compact)]
    assert parents == [None, None, None, first["id"], first["id"], second["id"], None]
    assert info(served, id)["leaves"] == [one["id"] for one in (side, again, sibling, behind, compact)]
    assert tokens(behind)[: len(tokens(second))] == tokens(second)


def test_other_tools_or_settings_of_the_template_begin_anew(served):
    id = served.open()
    first = chat(served, id, user("hello"))
    history = (user("hello"), said(first), user("so?"))
    for fields in ({"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}):
        other = chat(served, id, *history, **fields)
        assert other["session"]["parent_rid"] is None and other["session"]["template_differs_at"] is None
        alike = chat(served, id, *history, said(other), user("and?"), **fields)
        assert alike["session"]["parent_rid"] == other["id"]
    same = chat(served, id, *history, tools=TOOLS, tool_choice="none")
    assert same["session"]["parent_rid"] == first["id"], "the template shows no tools"
    by_field = served.chat(id, [user("and?")], {"rid": first["id"]}, tools=TOOLS)
    assert by_field["session"]["parent_rid"] == first["id"], "a session without branch goes on"
    assert by_field["session"]["template_differs_at"] is not None


def test_requests_at_the_same_time_are_branches(served):
    id = served.open()
    with held_between_steps(served.service.engine):
        waiting = [submit(chat, served, id, user(f"number {at}")) for at in range(4)]
        waiting += [submit(chat, served, id, user("number 0"), seed=1)]
    answers = [soon(one) for one in waiting]
    assert {one["session"]["parent_rid"] for one in answers} == {None}
    assert {*info(served, id)["leaves"]} == {one["id"] for one in answers}
    for one in answers:
        assert info(served, id, rid=one["id"])["token_ids"] == tokens(one)


def test_a_streaming_session_goes_on_by_its_path_and_has_one_branch(served):
    id = served.open(streaming=True)
    first = chat(served, id, user("hello"))
    second = chat(served, id, user("hello"), said(first), user("so?"))
    assert second["session"]["parent_rid"] == first["id"]
    error = served.error(path_of(id, CHAT), 400, messages=[user("another"), said(first), user("so?")])
    assert error["param"] == "messages.0"
    error = served.error(path_of(id, CHAT), 400, messages=[user("a")], session_params={"branch": True})
    assert error["param"] == "session_params.branch"
    ids = info(served, id)["token_ids"]
    third = served.ok(path_of(id, "/v1/completions"), prompt=[*ids, 9], max_tokens=2)
    assert third["session"]["parent_rid"] == second["id"]


def test_a_stream_is_a_turn_too(served):
    id = served.open()
    body = {"messages": [user("hello")], "max_tokens": 8, "stream": True}
    with served.client.stream("POST", path_of(id, CHAT), json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks)
    second = chat(served, id, user("hello"), {"role": "assistant", "content": text}, user("so?"))
    assert second["session"]["parent_rid"] == chunks[0]["id"]


def test_a_completion_goes_on_where_its_prompt_begins_as_a_turn(served, service):
    body: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    for id, prompt in (("ids", IDS), ("text", "hello the number")):
        path = path_of(served.open(session_id=id), "/v1/completions")
        first = served.ok(path, prompt=prompt, **body)
        whole = info(served, id)["token_ids"]
        second = served.ok(path, prompt=[*whole, 9], **body)
        assert (second["session"]["parent_rid"], second["session"]["num_history_tokens"]) == (first["id"], len(whole))
        again = served.ok(path, prompt=prompt, **body)
        other = served.ok(path, prompt=[*whole[:-1], 9, 10], **body)
        assert [one["session"]["parent_rid"] for one in (again, other)] == [None, None]
        assert len(info(served, id)["leaves"]) == 3
    answer = served.ok(path_of("ids", "/generate"), input_ids=[*IDS, 8], sampling_params={"max_new_tokens": 2})
    assert answer["meta_info"]["session"]["parent_rid"] is None
    assert served.error(path_of("ids", "/generate"), 400, prompt={"prompt_token_ids": IDS})["param"] == "prompt"
    error = served.error("/generate", 400, input_ids=[1, 2], session_params={"id": "ids", "messages": "all"})
    assert error["param"] == "session_params.messages"


def test_a_request_after_the_end_of_its_session_opens_no_empty_one(served):
    path = path_of("ended", CHAT)
    served.ok(path, messages=[user("a")])
    served.ok("/close_session", session_id="ended")
    assert served.error(path, 404, messages=[user("a")])["code"] == "session_closed"
    served.open(session_id="ended")  # which says that it is meant
    served.ok(path, messages=[user("a")])
    served.ok("/close_session", session_id="ended")


def test_refused_requests_leave_no_session_open(serve):
    served = serve(max_sessions=2)
    for number in range(5):
        path = path_of(f"refused {number}", CHAT)
        served.error(path, 400, messages=[user("a")], session_params={"rid": "none"})
        served.error(path, 400, messages=[{"role": "user", "content": "a " * 9000}])
        served.error(path, 400, messages=[user("a")], stream=True, session_params={"offset": 1})
    assert served.client.get("/state").json()["conversations"]["num_open"] == 0
    assert 'why="unused"} 15.0' in served.client.get("/metrics").text
    chat(served, "refused 0", user("a"))


def test_reports_of_a_session_are_those_of_the_server(served):
    assert served.client.get("/sessions/any/v1/models").json()["data"]
    name = served.client.get("/v1/models").json()["data"][0]["id"]
    assert served.client.get(f"/sessions/any/v1/models/{name}").json()["id"] == name
    assert served.client.get("/session_info", params={"session_id": "any"}).status_code == 404, "a report opens none"


# -- fields and ids -------------------------------------------------------------------------------------------------


def test_a_body_may_say_more_of_its_session_but_not_another_id(served):
    id = served.open()
    first = chat(served, id, user("hello"))
    chat(served, id, user("hello"), said(first), user("so?"), session_params={"replace": True})
    error = served.error(path_of(id, CHAT), 400, messages=[user("a")], session_params={"id": "another"})
    assert error["param"] == "session_params.id" and "another" in error["message"] and id in error["message"]
    for wrong, param in (
        ("x", "session_params"),
        ([{"id": id}], "session_params"),
        ({"branch": "x"}, "session_params.branch"),
    ):
        assert served.error(path_of(id, CHAT), 400, messages=[user("a")], session_params=wrong)["param"] == param
    error = served.error(path_of(id, CHAT), 400, messages=[user("a")], n=2)
    assert error["param"] == "session_params"
    closed = served.error(path_of("never", CHAT), 404, messages=[user("a")], session_params={"open": False})
    assert closed["code"] == "session_unknown"
    behind_router = served.error(path_of("never", CHAT), 404, messages=[user("a")], opens_session=False)
    assert behind_router["code"] == "session_unknown" and "/open_session" in behind_router["message"]


@pytest.mark.parametrize("id", ["a/b", "a b%2F", "ключ", "..a", "x" * 256, "?q=1#f", "%"])
def test_an_id_is_any_printable_text_and_is_percent_encoded(served, id):
    answer = chat(served, id, user("hello"))
    assert answer["session"]["id"] == id
    assert info(served, id)["num_turns"] == 1
    served.ok("/close_session", session_id=id)


@pytest.mark.parametrize("given", ["", ".", "..", "%2e%2E", "%0a", "%ff", "%C3", "x" * 257, "x" * 10_000, "%00"])
def test_an_id_that_no_session_has_is_refused_in_the_shape_of_its_path(served, given):
    body = json.dumps({"messages": [user("a")], "input_ids": [1]}).encode()
    for path in (CHAT, "/generate"):
        status, told = raw(served, "POST", f"/sessions/{given}{path}", body)
        assert status == 400 and told["error"]["param"] == "session_params.id" and len(str(told)) < 2000
        assert ("success" in told) == (path == "/generate")
        assert not given or f"not '{given[:100]}'" in told["error"]["message"], "as it was sent"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/sessions/a/v1/nothing", "openai"),
        ("/sessions/a/flush_cache", "sglang"),
        ("/sessions/a/v1/load_lora_adapter", "openai"),
        ("/sessions/a/b/v1/chat/completions", "sglang"),
        ("/sessions/a/sessions/b/v1/chat/completions", "sglang"),
        ("/sessions/a/../v1/chat/completions", "sglang"),
        ("/sessions/v1/chat/completions", "sglang"),
        ("/sessions/a", "sglang"),
        ("/sessions/", "sglang"),
        ("/sessions", "sglang"),
        ("/%73essions/a/v1/chat/completions", "openai"),
    ],
)
def test_a_wrong_path_behind_the_prefix_is_named(served, path, shape):
    status, told = raw(served, "POST", path)
    assert status == 404 and path.replace("%73", "s") in told["error"]["message"]
    assert ("success" in told) == (shape == "sglang")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/messages/batches", 501), ("/v1/messages/batches/b_1", 501), ("/v1/responses/resp_1", 501),
     ("/v1/responses/resp_1/cancel", 501), ("/v1/messages/nothing", 404), ("/v1/messages.x", 404)],
)  # fmt: skip
def test_a_part_that_is_not_supported_says_so_behind_the_prefix_too(served, path, status):
    found = [raw(served, "POST", prefix + path) for prefix in ("", "/sessions/a")]
    assert [told for told, _ in found] == [status, status]
    one, other = (told for _, told in found)
    assert one.keys() == other.keys() and one["error"].keys() == other["error"].keys()
    assert one["error"]["code"] == other["error"]["code"]
    if status == 404:
        assert "/v1/messages," in one["error"]["message"], "where generation is served"


def test_keys_guard_the_paths_of_sessions_as_the_paths_without(serve):
    served = serve(api_key="key", admin_api_key="admin")
    body = json.dumps({"messages": [user("a")], "max_tokens": 1}).encode()
    for path in (CHAT, "/v1/models", "/v1/completions", "/generate"):
        for id in ("a", "", "%ff"):
            status, told = raw(served, "GET" if path == "/v1/models" else "POST", f"/sessions/{id}{path}", body)
            assert status == 401 and ("success" in told) == (path == "/generate")
    for key, status in (("wrong", 403), ("key", 200), ("admin", 200)):
        assert raw(served, "POST", f"/sessions/a{CHAT}", body, Authorization=f"Bearer {key}")[0] == status
    for path in ("/sessions/a/flush_cache", "/sessions/a/v1/load_lora_adapter", "/sessions/a/v1/nothing"):
        assert raw(served, "POST", path, body, Authorization="Bearer key")[0] == 403, "unknown paths are administrative"
        assert raw(served, "POST", path, body, Authorization="Bearer admin")[0] == 404


def test_traffic_counts_the_path_without_the_session(serve):
    served = serve()
    chat(served, "counted", user("hello"))
    lines = [line for line in served.client.get("/metrics").text.splitlines() if "http_requests_total{" in line]
    assert any('path="/v1/chat/completions"' in line for line in lines) and not any(
        "sessions/" in line for line in lines
    )
    served.ok("/close_session", session_id="counted")


def test_the_middleware_changes_nothing_but_paths_of_sessions():
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    for path in ("/v1/chat/completions", "/sessionsx/a/v1/models", "/x/sessions/a/v1/models"):
        scope = {"type": "http", "path": path, "raw_path": path.encode()}
        asyncio.run(SessionPaths(app)(scope, None, None))  # type: ignore[arg-type]
        assert seen.pop() is scope and session_in(scope) is None
        assert with_session(scope, {"a": 1, "opens_session": False}) == {"a": 1}
    asyncio.run(SessionPaths(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen.pop() == {"type": "lifespan"}
