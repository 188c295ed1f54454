"""Tests of the sampling settings of sessions: their turns have them, whatever the requests ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.integration.http.conversations.sampling import NAMES, Numbers, SessionSampling, prompt_digest
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.edge.session_paths import path_of
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.engine.callers import trainer_logprobs

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
OWN = {"temperature": 0.5, "sampling_seed": 7, "max_new_tokens": 6, "top_p": 0.9}


def chat(served, id, messages, **fields):
    body = {"messages": messages, "return_token_ids": True, "logprobs": True, "max_tokens": 20, **fields}
    answer = served.ok(path_of(id, CHAT), **body)
    [choice] = answer["choices"]
    return choice


def info(served, id, **fields):
    return served.client.get("/session_info", params={"session_id": id, **fields}).json()


def test_the_turns_of_a_session_have_its_settings_and_the_requests_their_own_in_the_rest(served):
    id = served.open(sampling_params=OWN)
    mine = chat(served, id, HELLO, temperature=0, seed=1, top_p=0.1, top_k=1)
    assert len(mine["token_ids"]) == 6 and mine["finish_reason"] == "length"
    assert len(chat(served, id, [*HELLO, *HELLO], max_tokens=3)["token_ids"]) == 3, "fewer, where it asks for less"
    found = info(served, id, logprobs=True)
    assert found["sampling_params"] == OWN and {run["temperature"] for run in found["sampled"]} == {0.5}
    ids, logprobs = found["token_ids"], [one for run in found["sampled"] for one in run["logprobs"]]
    start = found["sampled"][0]["start"]
    theirs = trainer_logprobs(served.service.engine, ids, temperature=0.5)[start - 1 :]
    assert logprobs == theirs[: len(logprobs)]
    served.ok("/close_session", session_id=id)


def test_equal_sessions_have_equal_turns_and_a_state_that_is_asked_twice_has_two(served):
    def turns(id, num):
        with ThreadPoolExecutor(num) as pool:
            asked = pool.map(lambda _: tuple(chat(served, id, HELLO, temperature=0, seed=3)["token_ids"]), range(num))
            return sorted(asked)

    first, again = (turns(served.open(sampling_params={"sampling_seed": 7, "temperature": 1.0}), 4) for _ in range(2))
    assert first == again and len(set(first)) == 4
    other = turns(served.open(sampling_params={"sampling_seed": 8, "temperature": 1.0}), 4)
    assert not set(first) & set(other)


def test_a_request_that_failed_takes_no_seed(served, monkeypatch):
    drawn, taken = [], []
    take = Numbers.take
    monkeypatch.setattr(Numbers, "take", lambda self, digest: taken.append(take(self, digest)) or taken[-1])
    for fails in (True, False):
        id = served.open(sampling_params={"sampling_seed": 7})
        if fails:  # once its prompt is known
            assert served.post(path_of(id, CHAT), messages=HELLO, max_tokens=4, ebnf="root ::= (").status_code == 400
            assert taken == [0]
        drawn.append(chat(served, id, HELLO)["token_ids"])
    assert drawn[0] == drawn[1] and taken == [0, 0, 0]


def test_token_ids_have_the_settings_too(served):
    id = served.open(sampling_params={"max_new_tokens": 2, "temperature": 0.25})
    answer = served.generate(id, [5, 6, 7], max_new_tokens=9)
    assert len(answer["output_ids"]) == 2
    assert {run["temperature"] for run in info(served, id)["sampled"]} == {0.25}


def test_tokens_that_a_grammar_forced_are_marked(served):
    id = served.open()
    chat(served, id, HELLO, regex="abcd[ef]")
    [run] = info(served, id, logprobs=True)["sampled"]
    assert len(run["forced"]) == run["end"] - run["start"] and any(run["forced"])
    assert "forced" not in info(served, id)["sampled"][0]
    plain = served.open()
    chat(served, plain, HELLO)
    assert "forced" not in info(served, plain, logprobs=True)["sampled"][0]


def test_the_template_has_the_sessions_variables_where_a_request_sets_none(served, monkeypatch):
    tokenizer = served.service.engine.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ name }}:" + tokenizer.chat_template)
    id = served.open(chat_template_kwargs={"name": "owner"})
    assert info(served, id)["chat_template_kwargs"] == {"name": "owner"}
    assert tokenizer.decode(chat(served, id, HELLO)["prompt_token_ids"]).startswith("owner:")
    own = chat(served, id, HELLO, chat_template_kwargs={"name": "own"})
    assert tokenizer.decode(own["prompt_token_ids"]).startswith("own:")
    assert served.post("/open_session", chat_template_kwargs=5).status_code == 400
    large = served.open(chat_template_kwargs={"name": "x" * 100_000})
    assert info(served, large)["num_bytes"] > 100_000
    served.ok("/close_session", session_id=large)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stop": ["x"]}, "has 'stop'; a session sets temperature, "),
        ({"temperature": -1}, "temperature must be"),
        ({"sampling_seed": 2**70}, "sampling_seed must be"),
        ({"n": 2}, "has 'n'"),
    ],
)
def test_settings_that_no_session_has_are_named(served, given, why):
    answer = served.post("/open_session", sampling_params=given)
    assert answer.status_code == 400 and answer.json()["param"] == "sampling_params" and why in answer.json()["message"]


def test_a_request_that_asks_for_more_than_the_session_gives_is_refused(served):
    id = served.open(sampling_params={"max_new_tokens": 4})
    answer = served.post(path_of(id, CHAT), messages=HELLO, max_tokens=20, min_tokens=10)
    assert (
        answer.status_code == 400 and "min_new_tokens 10 exceeds max_new_tokens 4" in answer.json()["error"]["message"]
    )


def test_null_is_the_requests_own(served):
    sampling = SessionSampling.of({"temperature": None, "top_k": 5}, "x")
    assert sampling.params(SamplingParams(temperature=0.3), 0, 0) == SamplingParams(temperature=0.3, top_k=5)
    with pytest.raises(BadField):
        SessionSampling.of({"ignore_eos": True}, "x")
    assert set(NAMES) <= set(SamplingParams.__dataclass_fields__)


def test_numbers_are_the_smallest_that_are_free():
    numbers, digest = Numbers(), prompt_digest([1, 2])
    assert digest != prompt_digest([2, 1]) and [numbers.take(digest) for _ in range(3)] == [0, 1, 2]
    numbers.give_back(digest, 1)
    assert [numbers.take(digest), numbers.take(digest), numbers.take(5)] == [1, 3, 0]
