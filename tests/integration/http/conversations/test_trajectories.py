"""The promise of sessions by path: an agent that knows only its base URL leaves exact trajectories.

A scripted agent keeps its history itself, changes what agents change of it, asks on the side, tries again, compacts,
and works in parallel. Then for each leaf of its session the log-probabilities of one forward of the trainer over the
tokens are those of the session, in every bit, and each answer is in the branches that go on from it, and in no other.
"""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lockstep.integration.http.edge.session_paths import path_of
from lockstep.tests.integration.http.conversations.conftest import Served
from lockstep.tests.rollout.engine.callers import trainer_logprobs

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"town": "(città|東京)", "days": (1\.0|2\.5)\}\}\n</tool_call>'
THOUGHT = "<think>\n[a-z ]{1,8}\n</think>\n\n[a-z ]{1,8}\n"
Message = dict[str, Any]


@dataclass
class Agent:
    """An agent, of which the server sees requests at one base URL only."""

    served: Served
    id: str
    system: str = "You are an agent."
    temperature: float = 0.8
    seed: int = 1
    answers: dict[str, Any] = field(default_factory=dict)  # by id
    parents: dict[str, str | None] = field(default_factory=dict)  # that each answer should have

    def ask(self, messages: list[Message], parent: Any, **fields: object) -> Any:
        """Send a whole conversation. parent: the answer that it should go on from."""
        body = {"messages": messages, "max_tokens": 12, "temperature": self.temperature, "return_token_ids": True,
                "logprobs": True, "seed": self.seed, **fields}  # fmt: skip
        answer = self.served.ok(path_of(self.id, "/v1/chat/completions"), **body)
        self.answers[answer["id"]] = answer
        self.parents[answer["id"]] = None if parent is None else parent["id"]
        return answer

    def start(self, text: str) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": text}]


def message_of(answer: Any) -> Message:
    return answer["choices"][0]["message"]


def result_of(answer: Any) -> Message:
    return {"role": "tool", "tool_call_id": message_of(answer)["tool_calls"][0]["id"], "content": "rain"}


def as_javascript(message: Message) -> Message:
    """Return an answer as clients send it back that parse arguments, and keep few fields."""
    calls = []
    for call in message["tool_calls"]:
        given = json.loads(call["function"]["arguments"])
        days = int(given["days"]) if given["days"] == 1.0 else given["days"]
        text = json.dumps({"days": days, "town": given["town"]}, separators=(",", ":"))
        calls.append({"id": call["id"], "type": "function", "function": {"name": "weather", "arguments": text}})
    return {"role": "assistant", "tool_calls": calls}


def run(agent: Agent) -> None:
    """Work on a task."""
    call = {"tools": TOOLS, "regex": CALL, "max_tokens": 100}
    history = agent.start("How is the weather?")
    first = agent.ask(history, None, **call)
    agent.ask([{"role": "system", "content": "Name the topic."}, history[1]], None)
    agent.ask(history, None, tools=TOOLS)  # the first again, because its answer did not arrive
    history += [as_javascript(message_of(first)), result_of(first)]
    second = agent.ask(history, first, tools=TOOLS, regex=THOUGHT, max_tokens=40)
    told = {"role": "assistant", "content": [{"type": "text", "text": message_of(second)["content"].strip()}]}
    history += [told, {"role": "user", "content": "And tomorrow?"}]
    third = agent.ask(history, second, **call)
    with ThreadPoolExecutor(3) as pool:  # other samples of one state
        list(pool.map(lambda seed: agent.ask(history, second, seed=seed, tools=TOOLS), range(50, 53)))
    history += [message_of(third), result_of(third)]
    agent.ask(history, third, tools=TOOLS)
    agent.ask(history, None, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    compact = [*agent.start("It rains in all towns. Go on."), {"role": "user", "content": "And tomorrow?"}]
    fourth = agent.ask(compact, None, tools=TOOLS)
    agent.ask([*compact, message_of(fourth), {"role": "user", "content": "so?"}], fourth, tools=TOOLS)
    changed = {**message_of(fourth), "content": "what the agent made of it"}
    agent.ask([*compact, changed, {"role": "user", "content": "so?"}], None, tools=TOOLS)


def branch_of(agent: Agent, rid: str) -> list[str]:
    """Return the ids of the answers up to one, the first one first."""
    found: list[str] = []
    at: str | None = rid
    while at is not None:
        found.insert(0, at)
        at = agent.parents[at]
    return found


def check(agent: Agent) -> int:
    """Check all branches of an agent's session. Returns their number."""
    client, service = agent.served.client, agent.served.service
    whole = client.get("/session_info", params={"session_id": agent.id}).json()
    assert {one["rid"]: one["parent_rid"] for one in whole["turns"]} == agent.parents
    assert {one["rid"]: one["finish_reason"] for one in whole["turns"]} == {
        id: {"tool_calls": "stop"}.get(why := answer["choices"][0]["finish_reason"], why)
        for id, answer in agent.answers.items()
    }
    assert {*whole["leaves"]} == {*agent.parents} - {*agent.parents.values()}
    told: dict[str, Any] = {"session_id": agent.id, "logprobs": True}
    for rid in whole["leaves"]:
        branch = client.get("/session_info", params={**told, "rid": rid}).json()
        ids, expected = branch["token_ids"], trainer_logprobs(service.engine, branch["token_ids"], agent.temperature)
        assert [run["rid"] for run in branch["sampled"]] == branch_of(agent, rid)
        for run in branch["sampled"]:
            [choice] = agent.answers[run["rid"]]["choices"]
            assert ids[: run["end"]] == [*choice["prompt_token_ids"], *choice["token_ids"]]
            assert ids[run["start"] : run["end"]] == choice["token_ids"]
            assert run["logprobs"] == [one["logprob"] for one in choice["logprobs"]["content"]]
            assert run["logprobs"] == expected[run["start"] - 1 : run["end"] - 1]
            assert np.array(run["logprobs"], np.float32).astype(np.float64).tolist() == run["logprobs"]
            assert (run["version"], run["temperature"]) == (service.engine.weight_version, agent.temperature)
    return len(whole["leaves"])


def test_each_branch_of_an_agents_session_is_what_the_trainer_computes(served):
    agent = Agent(served, "an agent's")
    run(agent)
    assert check(agent) == 9
    served.ok("/close_session", session_id=agent.id)


def test_many_agents_at_a_time_have_each_their_own_branches(served):
    agents = [
        Agent(served, f"task {at}/sample {at % 2}", f"You are agent {at % 2}.", 0.5 + at / 4, at) for at in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, agents))
    assert [check(agent) for agent in agents] == [9] * 4
    for agent in agents:
        served.ok("/close_session", session_id=agent.id)


def as_sent_back(draw: random.Random, message: Message) -> Message:
    """Return an answer with some of the changes that clients make."""
    if message.get("tool_calls") and draw.random() < 0.5:
        return as_javascript(message)
    changes: list[dict[str, object]] = [
        {"refusal": None, "annotations": []}, {"name": "planner"}, {"reasoning_content": None},
        {"content": (message["content"] or "").strip()},
        {"content": [{"type": "text", "text": message["content"] or ""}]},
    ]  # fmt: skip
    return {**message, **draw.choice(changes)}


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_that_goes_back_at_random_finds_its_tokens(served, seed):
    draw, agent = random.Random(seed), Agent(served, f"random {seed}")
    known: list[tuple[list[Message], Any]] = [(agent.start("hello"), None)]
    forms = ({"max_tokens": 8}, {"regex": CALL, "max_tokens": 100}, {"regex": THOUGHT, "max_tokens": 40})
    for number in range(30):
        history, parent = draw.choice(known[-6:])
        answer = agent.ask(history, parent, tools=TOOLS, seed=100 * seed + number, **draw.choice(forms))
        if draw.random() < 0.8:
            more = [as_sent_back(draw, message_of(answer)), {"role": "user", "content": f"number {number}"}]
            if message_of(answer).get("tool_calls"):
                more.insert(1, result_of(answer))
            known.append(([*history, *more], answer))
    assert check(agent) >= 5
    served.ok("/close_session", session_id=agent.id)


@pytest.mark.parametrize("text", ["{5}", '{"name": "weather"', '{"name": "weather", "arguments": 5}', ""])
def test_an_answer_with_a_malformed_call_is_a_text_that_comes_back(served, text):
    agent = Agent(served, f"malformed {text}")
    history, regex = agent.start("hello"), f"<tool_call>{re.escape(text)}</tool_call>"
    first = agent.ask(history, None, tools=TOOLS, regex=regex, max_tokens=60)
    assert "tool_calls" not in message_of(first) and message_of(first)["content"].startswith("<tool_call>")
    agent.ask([*history, message_of(first), {"role": "user", "content": "so?"}], first, tools=TOOLS)
    assert check(agent) == 1
    served.ok("/close_session", session_id=agent.id)


def test_a_call_with_half_of_a_surrogate_pair_is_a_turn(served):
    agent = Agent(served, "half a pair")
    history, text = agent.start("hello"), '{"name": "weather", "arguments": {"town": "\\ud800"}}'
    regex = f"<tool_call>{re.escape(text)}</tool_call>"
    first = agent.ask(history, None, tools=TOOLS, regex=regex, max_tokens=90)
    assert message_of(first)["tool_calls"][0]["function"]["arguments"] == '{"town": "\\ud800"}'
    agent.ask([*history, message_of(first), result_of(first)], first, tools=TOOLS)
    assert check(agent) == 1
    alone = served.chat(None, [*history, message_of(first), result_of(first)], tools=TOOLS)
    assert "\\ud800" in served.service.engine.tokenizer.decode(alone["choices"][0]["prompt_token_ids"])
    served.ok("/close_session", session_id=agent.id)


def ask_by_messages(served: Served, id: str, history: list[Any], text: str | None, **fields: object) -> Any:
    """Ask by Anthropic's API, and send the answer's blocks back as they came. text: a user's; None: a tool's result."""
    if text is None:
        [call] = [block for block in history[-1]["content"] if block["type"] == "tool_use"]
        history.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}]}
        )
    else:
        history.append({"role": "user", "content": [{"type": "text", "text": text}]})
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    answer = served.ok(path_of(id, "/v1/messages"), messages=history, system="be", tools=tools, **fields)
    history.append({"role": "assistant", "content": answer["content"]})
    return answer


def ask_by_responses(served: Served, id: str, history: list[Any], text: str | None, **fields: object) -> Any:
    """Ask by the Responses API, and send the answer's items back as they came. text: see `ask_by_messages`."""
    if text is None:
        [call] = [item for item in history if item.get("type") == "function_call"]
        history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "rain"})
    else:
        history.append({"role": "user", "content": [{"type": "input_text", "text": text}]})
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    fields["max_output_tokens"] = fields.pop("max_tokens")
    answer = served.ok(path_of(id, "/v1/responses"), input=history, instructions="be", tools=tools, **fields)
    history += answer["output"]
    return answer


@pytest.mark.parametrize("ask", [ask_by_messages, ask_by_responses])
def test_agents_of_other_apis_have_their_tokens_stand(served, ask):
    id, history, body = ask.__name__, [], {"seed": 3, "temperature": 1.0, "max_tokens": 100}
    first = ask(served, id, history, "How is the weather?", regex=CALL, **body)
    second = ask(served, id, history, None, regex=THOUGHT, **body)
    again = ask(served, id, history[:1], "How?", **body)
    third = ask(served, id, history, "And tomorrow?", **body)
    told: dict[str, Any] = {"session_id": id, "logprobs": True}
    branch = served.client.get("/session_info", params=told).json()
    assert branch["leaves"] == [again["id"], third["id"]]
    assert [run["rid"] for run in branch["sampled"]] == [first["id"], second["id"], third["id"]]
    expected = trainer_logprobs(served.service.engine, branch["token_ids"], 1.0)
    for run in branch["sampled"]:
        assert run["logprobs"] == expected[run["start"] - 1 : run["end"] - 1]
    [call] = branch["messages"][2]["tool_calls"]
    assert f'"{call["id"]}"' in json.dumps(first), "the client got the id that the session has"
    assert branch["messages"][4]["reasoning_content"]
    error = served.post(path_of("x" * 257, "/v1/messages"), messages=[], max_tokens=1).json()
    assert error["type"] == "error" and error["error"]["param"] == "session_params.id"
    served.ok("/close_session", session_id=id)


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_an_answer_that_was_cut_goes_on_token_by_token(served, max_tokens):
    agent = Agent(served, f"cut {max_tokens}")
    history, body = agent.start("hello"), {"ignore_eos": True, "max_tokens": max_tokens}
    first = agent.ask(history, None, **body)
    history.append(message_of(first))
    second = agent.ask(history, first, continue_final_message=True, **body)
    assert second["choices"][0]["prompt_token_ids"] == (
        first["choices"][0]["prompt_token_ids"] + first["choices"][0]["token_ids"]
    )
    history += [message_of(second), {"role": "user", "content": "so?"}]
    agent.ask(history, second)
    assert check(agent) == 1
    path = path_of(agent.id, "/v1/chat/completions")
    error = served.error(path, 400, messages=[*history, {"role": "assistant", "content": "I"}],
                         continue_final_message=True)  # fmt: skip
    assert error["param"] == "continue_final_message"
    message = served.ok(path_of(agent.id, "/v1/messages"), messages=[history[1]], system=history[0]["content"], **body)
    assert message["stop_reason"] == "max_tokens"
    told = [history[1], {"role": "assistant", "content": message["content"]}]
    more = served.ok(path_of(agent.id, "/v1/messages"), messages=told, system=history[0]["content"], **body)
    assert more["session"]["parent_rid"] == message["id"]
    served.ok("/close_session", session_id=agent.id)


def test_a_count_of_tokens_is_the_same_under_a_session(served):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    counted = [
        served.ok(path, **body) for path in ("/v1/messages/count_tokens", "/sessions/a/v1/messages/count_tokens")
    ]
    assert counted[0] == counted[1] and counted[0]["input_tokens"] > 0
