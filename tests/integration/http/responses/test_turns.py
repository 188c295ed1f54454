"""Tests of requests on sessions: what an agent sends back is recognised, and its id names an answer."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from lockstep.integration.http.conversations.messages import encoded
from lockstep.integration.http.conversations.store import Sessions
from lockstep.integration.http.conversations.turns import Turn
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.responses.api import first_message
from lockstep.tests.integration.http.responses.conftest import Served, forced
from lockstep.tests.integration.http.responses.test_answers import TOOLS
from lockstep.tests.support.chat.answers import WHOLE

PARTS = [WHOLE[0].text, "<think>\nHm.\n</think>\n\nIt rains.", "One.<tool_call>\n"
         '{"name": "now", "arguments": {}}\n</tool_call>Two.']  # fmt: skip
PATCH = {"type": "custom", "name": "patch"}


@pytest.fixture
def session(served: Served) -> str:
    return served.http.post("/open_session", json={"capacity_of_str_len": 0}).json()


def outputs_of(answer: Any) -> list[dict[str, Any]]:
    """Return the outputs of the calls of an answer."""
    return [{"type": one["type"] + "_output", "call_id": one["call_id"], "output": "done"}
            for one in answer["output"] if one["type"].endswith("_call")]  # fmt: skip


@pytest.mark.parametrize("text", PARTS)
def test_an_agent_that_sends_everything_back_goes_on_with_the_tokens_as_they_were(served: Served, session, text):
    ask = {"session_params": {"id": session}, "tools": TOOLS, "instructions": "Help.", "return_token_ids": True}
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = served.ok(items, max_output_tokens=500, structured_outputs=forced(text), **ask)
    assert first["session"]["rid"] == first["id"] and first["session"]["num_history_tokens"] == 0
    items += [*first["output"], *(outputs_of(first) or [{"role": "user", "content": "And now?"}])]
    second = served.ok(items, **ask)
    history = first["prompt_token_ids"] + first["token_ids"]
    assert second["session"]["parent_rid"] == first["id"]
    assert second["session"]["num_history_tokens"] == len(history)
    assert second["prompt_token_ids"][: len(history)] == history


def test_an_answer_behind_another_one_is_a_turn_of_its_own(served: Served, session):
    path, asks = f"/sessions/{session}/v1/responses", {"return_token_ids": True}
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = served.ok(items, path, **asks)
    second = served.ok([*items, *first["output"]], path, **asks)
    assert second["session"]["parent_rid"] == first["id"]
    items += [*first["output"], *second["output"], {"role": "user", "content": "And now?"}]
    third = served.ok(items, path, **asks)
    history = second["prompt_token_ids"] + second["token_ids"]
    assert third["session"]["parent_rid"] == second["id"]
    assert third["session"]["num_history_tokens"] == len(history)
    assert third["prompt_token_ids"][: len(history)] == history


def test_an_answer_that_was_cut_goes_on_and_both_parts_come_back(served: Served, session):
    path = f"/sessions/{session}/v1/responses"
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = served.ok(items, path, max_output_tokens=3)
    items += first["output"]
    second = served.ok(items, path, continue_final_message=True)
    assert second["session"]["parent_rid"] == first["id"]
    third = served.ok([*items, *second["output"], {"role": "user", "content": "And now?"}], path)
    assert third["session"]["parent_rid"] == second["id"]


def test_an_answer_is_gone_on_from_by_its_id_with_what_is_new(served: Served, session):
    ask = {"session_params": {"id": session}, "return_token_ids": True, "instructions": "Help."}
    first = served.ok("Weather?", **ask)
    second = served.ok("And now?", previous_response_id=first["id"], **ask)
    other = served.ok("And then?", previous_response_id=first["id"], **{**ask, "instructions": None})
    for answer in (second, other):
        history = first["prompt_token_ids"] + first["token_ids"]
        assert answer["prompt_token_ids"][: len(history)] == history
        assert answer["session"]["parent_rid"] == answer["previous_response_id"] == first["id"]
    tokenizer = served.service.engine.tokenizer
    assert tokenizer is not None
    new = tokenizer.decode(second["prompt_token_ids"][len(history) :])
    assert "And now?" in new and "Help." not in new
    told = served.error(previous_response_id=first["id"], session_params={"id": session}, instructions="Other.")
    assert told["param"] == "instructions" and "tokens stand" in told["message"]


def test_the_first_message_is_parsed_alone():
    """The others may be long, and short requests are read on the event loop."""
    sessions = Sessions(HttpConfig())
    session = sessions.open()
    first = encoded({"role": "system", "content": "Help."})
    turn = Turn("a", None, 0, array("i"), 0, None, (), messages=(first, b"no JSON"))
    session.turns["a"] = turn
    session.turns["b"] = Turn("b", turn, 0, array("i"), 0, None, (), messages=(b"no JSON",))
    session.turns["c"] = Turn("c", None, 0, array("i"), 0, None, ())
    for rid in ("a", "b"):
        assert first_message(sessions, session.id, rid) == {"role": "system", "content": "Help."}
    assert first_message(sessions, session.id, "c") is first_message(sessions, session.id, "d") is None
    assert first_message(sessions, "none", "a") is None


def test_the_outputs_of_calls_are_new_input(served: Served, session):
    ask = {"session_params": {"id": session}, "tools": [*TOOLS, PATCH]}
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a"}}\n</tool_call>'
    first = served.ok(max_output_tokens=500, structured_outputs=forced(call), **ask)
    second = served.ok(outputs_of(first), previous_response_id=first["id"], **ask)
    assert second["session"]["parent_rid"] == first["id"]
    third = served.ok(
        [{"role": "user", "content": "Weather?"}, *first["output"], *outputs_of(first), *second["output"],
         {"role": "user", "content": "Thanks."}], **ask,
    )  # fmt: skip
    assert third["session"]["parent_rid"] == second["id"]


@pytest.mark.parametrize("arguments", [
    '{"patch": "a\\u00fc", "n": 1.0}', '{"input": 5}', "{}", '{"input": "{\\"a\\": 1}"}', '{"input": "\\ud800"}',
])  # fmt: skip
@pytest.mark.parametrize("keeps_ids", [True, False])
def test_a_custom_tool_that_is_called_with_other_arguments_keeps_its_turn(
    served: Served, session, arguments, keeps_ids
):
    path, asks = f"/sessions/{session}/v1/responses", {"tools": [PATCH]}
    call = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    first = served.ok(path=path, max_output_tokens=500, structured_outputs=forced(call), **asks)
    assert first["output"][0]["type"] == "custom_tool_call"
    items = [{"role": "user", "content": "Weather?"}, *first["output"], *outputs_of(first)]
    if not keeps_ids:
        items = [{**item, "call_id": "call_1"} if "call_id" in item else item for item in items]
    second = served.ok(items, path, **asks)
    assert second["session"]["parent_rid"] == first["id"]


def test_clients_that_know_nothing_of_sessions_have_one_by_its_path(served: Served, session):
    path = f"/sessions/{session}/v1/responses"
    first = served.ok("Weather?", path, instructions="Help.", return_token_ids=True)
    user = {"role": "user", "content": "Weather?"}
    whole = served.ok([user, *first["output"], {"role": "user", "content": "And now?"}], path, instructions="Help.")
    new = served.ok("And now?", path, instructions="Help.", previous_response_id=first["id"], return_token_ids=True)
    history = first["prompt_token_ids"] + first["token_ids"]
    assert new["prompt_token_ids"][: len(history)] == history
    assert whole["session"]["parent_rid"] == new["session"]["parent_rid"] == first["id"]
    assert whole["usage"]["input_tokens"] == new["usage"]["input_tokens"]
    other = served.ok("Weather?", path, instructions="Do not help.")
    assert other["session"]["parent_rid"] is None


@pytest.mark.parametrize("changed", [{"tools": TOOLS}, {"reasoning": {"effort": "low"}}])
def test_an_answer_goes_on_with_other_tools_in_a_conversation_that_shows_them(served: Served, session, changed):
    path = f"/sessions/{session}/v1/responses"
    first = served.ok("Weather?", path, instructions="Help.", return_token_ids=True)
    ask = {"instructions": "Help.", "return_token_ids": True, **changed}
    new = served.ok("And now?", path, previous_response_id=first["id"], **ask)
    user = [{"role": "user", "content": text} for text in ("Weather?", "And now?", "Then?")]
    assert new["session"]["parent_rid"] is None and new["session"]["template_differs_at"] is None
    next_one = served.ok("Then?", path, previous_response_id=new["id"], **ask)
    assert next_one["session"]["parent_rid"] == new["id"]
    alike = served.ok([user[0], *first["output"], user[1], *new["output"], user[2]], path, **ask)
    assert alike["session"]["parent_rid"] == new["id"]
    whole = served.ok([user[0], *first["output"], user[1]], path, **ask)
    assert new["prompt_token_ids"] == whole["prompt_token_ids"]
    by_field = served.ok("And now?", previous_response_id=first["id"], session_params={"id": session}, **ask)
    assert by_field["session"]["parent_rid"] == first["id"], "a session without branch goes on"


def test_a_previous_answer_needs_a_session_that_has_it(served: Served, session):
    told = served.error(previous_response_id="resp_1")
    assert told["param"] == "previous_response_id" and "session_params" in told["message"]
    told = served.error(previous_response_id="resp_1", session_params={"id": session}, instructions="Help.")
    assert told["param"] == "previous_response_id" and "'resp_1'" in told["message"]
    told = served.error(previous_response_id="resp_1", session_params={"id": session, "rid": "resp_2"})
    assert told["param"] == "session_params.rid"
    told = served.error(404, previous_response_id="resp_1", session_params={"id": "none"})
    assert told["param"] == "session_params.id"


def test_a_message_that_differs_is_named_by_its_item(served: Served, session):
    ask = {"session_params": {"id": session}}
    first = served.ok([{"role": "user", "content": "Weather?"}], **ask)
    items = [{"role": "user", "content": "Whether?"}, *first["output"], {"role": "user", "content": "And now?"}]
    told = served.error(input=items, **ask)
    assert told["param"] == "input.0" and told["message"].startswith("input.0: differs")


def test_streamed_turns_have_their_session_in_the_last_event(served: Served, session):
    with served.openai.responses.stream(
        model="small", input="Weather?", extra_body={"session_params": {"id": session}, "seed": 1,
                                                     "structured_outputs": forced(PARTS[0])}, tools=TOOLS,
    ) as stream:  # fmt: skip
        first = stream.get_final_response().to_dict()
    items = [{"role": "user", "content": "Weather?"}, *first["output"], *outputs_of(first)]
    second = served.ok(items, session_params={"id": session}, tools=TOOLS)
    assert second["session"]["parent_rid"] == first["session"]["rid"] == first["id"]  # type: ignore[index]
