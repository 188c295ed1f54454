"""Streams that go on at another worker where they were: every wire, over real servers whose connections are cut."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.router.moving.streaming import stream_from
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.router.cut_workers import CutWorker
from lockstep.tests.support.fake_workers import WAIT_S, Fleet, Handler, counted, settled, wait_until
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.target import TargetError

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
LENGTH = 200
OWN = {"e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"}  # of each run
SAMPLED = {"max_new_tokens": LENGTH, "ignore_eos": True, "sampling_seed": 11}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = random_model("qwen3", vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=256), tokenizer=tokenizer))
    assert service.name_weights() is not None  # as a router asks for
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
        service.engine.stop()


def events_of(answer: httpx.Response) -> list[dict]:
    """Return the objects of a stream's events; the stream must have come to its end."""
    assert answer.status_code == 200, answer.text
    assert ": progress" not in answer.text, "comments are for routers"
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def without(value: object, names: set[str]) -> object:
    """Return a JSON value without these keys, wherever they are."""
    if isinstance(value, dict):
        return {name: without(one, names) for name, one in value.items() if name not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def assert_equal(found: dict, expected: dict) -> None:
    """Check two JSON objects but for the keys of `OWN`."""
    found, expected = without(found, OWN), without(expected, OWN)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[name], value)
        else:
            assert found[name] == value, name


def merged(events: list[dict]) -> dict[int, dict[str, object]]:
    """Put the pieces of OpenAI's and vLLM's streams together, by choice."""
    found: dict[int, dict[str, object]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = found.setdefault(choice.pop("index"), {})
            for name, value in {**choice, **choice.pop("delta", {})}.items():
                _append(whole, name, value)
    return found


def _append(whole: dict, name: str, value: object) -> None:
    old = whole.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
        for inner, one in value.items():
            _append(old, inner, one)
    elif isinstance(value, str | list) and isinstance(old, type(value)) and name not in ("finish_reason", "role"):
        whole[name] = old + value
    elif value is not None or name not in whole:
        whole[name] = value


def cuts(*numbers: int | None) -> Callable[[], int | None]:
    """Return a function that returns these numbers of events one after the other, then None."""
    left = itertools.chain(numbers, itertools.repeat(None))
    return lambda: next(left)


def named_events_of(answer: httpx.Response) -> list[dict]:
    """Return the objects of a stream of named events."""
    assert answer.status_code == 200, answer.text
    assert ": progress" not in answer.text, "comments are for routers"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def cut_fleet(make_fleet, url) -> Callable[..., Fleet]:
    def make(*numbers: int | None, **settings: object) -> Fleet:
        each = cuts(*numbers)
        return make_fleet([CutWorker(url, each) for _ in range(3)], **settings)

    return make


GENERATE = {
    "plain": {"sampling_params": SAMPLED},
    "log-probabilities": {"sampling_params": SAMPLED, "return_logprob": True, "logprob_start_len": 0},
    "alternatives": {"sampling_params": SAMPLED, "return_logprob": True, "top_logprobs_num": 3,
                     "token_ids_logprob": [4, 5]},
    "samples": {"sampling_params": {**SAMPLED, "n": 3}, "return_logprob": True},
    "greedy": {"sampling_params": {**SAMPLED, "temperature": 0}},
    "intervals": {"sampling_params": {**SAMPLED, "stream_interval": 3}},
}  # fmt: skip


@pytest.mark.parametrize("check", ["proven", "trusted"])
@pytest.mark.parametrize("what", GENERATE)
def test_a_stream_of_generate_goes_on_where_it_was(cut_fleet, url, what, check):
    body = {"input_ids": PROMPT, "stream": True, "rid": "mine", "speculation": False, **GENERATE[what]}
    fleet = cut_fleet(1, 1, 0, 2, moved_streams=check)
    moved = events_of(fleet.post("/generate", body))
    undisturbed = events_of(httpx.post(f"{url}/generate", json=body, timeout=WAIT_S))
    last = {event.get("index", 0): event for event in undisturbed}
    ends = {event.get("index", 0): event for event in moved if event["meta_info"]["finish_reason"]}
    assert ends.keys() == last.keys()
    for index, event in last.items():
        assert_equal(ends[index], event)
        lengths = [len(event["output_ids"]) for event in moved if event.get("index", 0) == index]
        assert lengths == sorted(set(lengths)), "no event repeats what the client has"
    assert counted(fleet)["moved_streams_total", "moved"] == 4


OPENAI = {"max_tokens": LENGTH, "ignore_eos": True, "seed": 11, "speculation": False, "stream": True,
          "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
SAID = [{"role": "user", "content": "12+3="}]
STREAMS = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "logprobs": 2, "n": 2, **OPENAI}),
    "completions of texts": ("/v1/completions", {"prompt": ["1+", "2"], "echo": True, **OPENAI}),
    "completions with ids": ("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, **OPENAI}),
    "chat": ("/v1/chat/completions", {"messages": SAID, "logprobs": True, "top_logprobs": 2, **OPENAI}),
    "chat with samples": (
        "/v1/chat/completions", {"messages": SAID, "n": 3, "rid": "mine", "return_meta_info": True, **OPENAI},
    ),
    "tokens": ("/inference/v1/generate", {
        "token_ids": PROMPT, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        "sampling_params": {"max_tokens": LENGTH, "ignore_eos": True, "seed": 11, "logprobs": 1, "n": 2},
    }),
    "texts": ("/inference/v1/generate", {
        "token_ids": PROMPT, "stream": True, "output_mode": "text",
        "sampling_params": {"max_tokens": LENGTH, "seed": 11, "stop": ["5"]},
    }),
}  # fmt: skip


USAGE = ("usage", "created_at")
WEIGHTS = ("metadata", "weight_digest", "weight_versions")


def weights_of(events: list[dict]) -> dict[int, list]:
    """Return what a stream says of the weights of each sequence."""
    return {event["choices"][0]["index"]: [event[name] for name in WEIGHTS] for event in events if WEIGHTS[0] in event}


@pytest.mark.parametrize("check", ["proven", "trusted"])
@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_of_new_output_goes_on_without_a_gap_or_a_repetition(cut_fleet, url, what, check):
    path, body = STREAMS[what]
    fleet = cut_fleet(1, 2, 0, 1, moved_streams=check)
    moved = events_of(fleet.post(path, body))
    undisturbed = events_of(httpx.post(f"{url}{path}", json=body, timeout=WAIT_S))
    own = {"choices", "usage", "prompt_token_ids", *WEIGHTS}
    heads = {json.dumps(without(event, own), sort_keys=True) for event in moved}
    assert len(heads) == 1, "every event has the first one's id and time"
    assert weights_of(moved) == weights_of(undisturbed)
    usages = [event["usage"] for event in moved if not event["choices"]]
    assert usages == [event["usage"] for event in undisturbed if not event["choices"]]
    found, expected = merged(moved), merged(undisturbed)
    assert found.keys() == expected.keys()
    for index, choice in expected.items():
        assert_equal(found[index], choice)
    assert counted(fleet)["moved_streams_total", "moved"] >= 1  # a short answer may end before the other cuts


NAMED = {
    "message": ("/v1/messages", {
        "messages": SAID, "max_tokens": 30, "seed": 11, "ignore_eos": True, "stream": True, "logprobs": True,
        "return_token_ids": True, "speculation": False,
    }),
    "response": ("/v1/responses", {
        "input": SAID, "max_output_tokens": 30, "seed": 11, "ignore_eos": True, "stream": True, "logprobs": True,
        "return_token_ids": True, "speculation": False, "rid": "resp_mine",
    }),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_a_stream_of_named_events_is_cut_between_outputs_only(make_fleet, url, what):
    path, body = NAMED[what]
    left: list[int] = []
    fleet = make_fleet([CutWorker(url, lambda: left.pop(0) if left else None) for _ in range(3)])
    expected = named_events_of(httpx.post(f"{url}{path}", json=body, timeout=WAIT_S))
    for numbers in ((1, 2, 3), (2, 1, 4), (5, 0, 1), (len(expected) - 1,), (len(expected) - 2, 1)):
        left[:] = numbers
        moved = named_events_of(fleet.post(path, body))
        assert len(left) < len(numbers)
        assert [event["type"] for event in moved] == [event["type"] for event in expected]
        assert [event.get("sequence_number") for event in moved] == [one.get("sequence_number") for one in expected]
        for found, event in zip(moved, expected, strict=True):
            assert without(found, {*OWN, "id", *USAGE}) == without(event, {*OWN, "id", *USAGE})


def test_every_prompt_gets_a_seed_before_it_is_sent(fleet):
    asked = {
        "/generate": {"input_ids": [PROMPT, PROMPT], "sampling_params": {"n": 2}},
        "/v1/completions": {"prompt": [PROMPT, PROMPT], "n": 2},
        "/v1/chat/completions": {"messages": SAID},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {}},
    }
    seeds = set()
    for path, body in asked.items():
        fleet.post(path, body)
        [sent] = [call for worker in fleet.workers for call in worker.asked(path)]
        seeds.add(seed := sent.pop("default_seed"))
        assert isinstance(seed, int) and sent.pop("progress") is True and sent == body
    assert len(seeds) == 4
    fleet.post("/renew", {"text": "a"})
    [sent] = [call for worker in fleet.workers for call in worker.asked("/renew")]
    assert sent == {"text": "a"}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_samples_without_seeds_differ_within_a_request_and_are_those_of_its_seed(make_fleet, url, path):
    fleet = make_fleet([CutWorker(url, lambda: None)])
    params = {"max_new_tokens": 8, "ignore_eos": True, "n": 2}
    if path == "/generate":
        body = {"input_ids": [PROMPT, PROMPT], "sampling_params": params}
    else:
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 8, "n": 2, "ignore_eos": True, "return_token_ids": True}
    answer = fleet.post(path, body).json()
    [sent] = fleet.workers[0].asked(path)
    again = httpx.post(f"{url}{path}", json=sent, timeout=WAIT_S).json()

    def outputs(found) -> list[list[int]]:
        if path == "/generate":
            return [one["output_ids"] for one in found]
        return [one["token_ids"] for one in found["choices"]]

    assert outputs(answer) == outputs(again) and len({tuple(one) for one in outputs(answer)}) == 4


def test_a_worker_refuses_a_begun_answer_by_name(url):
    info = httpx.get(f"{url}/server_info").json()
    one = {"token_ids": [1], "logprobs": [-0.5], "num_chars": 1, "spans": [["default", info["weight_digest"], 0]]}
    begun = {"sequences": [one], "weight_digest": info["weight_digest"], "guarantee": info["guarantee"],
             "head": {"rids": ["a"]}}  # fmt: skip
    wrong = {
        "begun.sequences.0.logprobs": {"sequences": [{**one, "logprobs": []}]},
        "begun.sequences.0.spans": {"sequences": [{**one, "spans": []}]},
        "begun.sequences.0.token_ids": {"sequences": [{**one, "token_ids": [-1]}]},
        "begun.sequences": {"sequences": [one, one]},
        "begun.head.rids": {"head": {}},
        "begun.check": {"check": "hoped"},
    }
    for field, change in wrong.items():
        body = {"input_ids": PROMPT, "sampling_params": SAMPLED, "begun": {**begun, **change}}
        answer = httpx.post(f"{url}/generate", json=body, timeout=WAIT_S)
        assert answer.status_code == 400 and field in answer.json()["message"], answer.text
    unseeded = {"input_ids": PROMPT, "begun": begun}
    assert "seed" in httpx.post(f"{url}/generate", json=unseeded, timeout=WAIT_S).json()["message"]
    others = {"digest": {"weight_digest": "0" * 64}, "isa": {"guarantee": {**info["guarantee"], "isa": "other"}},
              "other weights": {"sequences": [{**one, "spans": [["1", "0" * 64, 0]]}]}}  # fmt: skip
    for words, change in others.items():
        body = {"input_ids": PROMPT, "sampling_params": SAMPLED, "begun": {**begun, **change}}
        answer = httpx.post(f"{url}/generate", json=body, timeout=WAIT_S)
        assert answer.status_code == 409 and words in answer.json()["message"], answer.text


@pytest.mark.parametrize("change", ["token", "log-probability"])
def test_a_claim_that_is_not_proven_is_refused_with_its_position(url, change):
    ask = {"input_ids": PROMPT, "sampling_params": SAMPLED, "return_logprob": True}
    answer = httpx.post(f"{url}/generate", json=ask, timeout=WAIT_S).json()
    info = httpx.get(f"{url}/server_info").json()
    token_ids = answer["output_ids"][:9]
    logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"][:9]]
    if change == "token":
        token_ids[7] = (token_ids[7] + 1) % 50
    else:
        logprobs[7] = logprobs[7] * (1 + 2**-23)
    one = {"token_ids": token_ids, "logprobs": logprobs, "num_chars": 0,
           "spans": [["default", info["weight_digest"], 0]]}  # fmt: skip
    begun = {"sequences": [one], "weight_digest": info["weight_digest"], "guarantee": info["guarantee"],
             "head": {"rids": ["a"]}}  # fmt: skip
    refused = httpx.post(f"{url}/generate", json={**ask, "begun": begun}, timeout=WAIT_S)
    assert refused.status_code == 409 and "at output token 7" in refused.json()["message"], refused.text


@pytest.mark.parametrize("what", ["digest", "isa"])
def test_a_stream_that_no_worker_can_go_on_with_ends_with_an_error_that_names_each_reason(make_fleet, url, what):
    workers = [CutWorker(url, lambda: 1) for _ in range(2)]
    for worker in workers:  # it has ended, and another process has its address
        if what == "digest":
            worker.info["weight_digest"] = "0" * 64
        else:
            worker.info["guarantee"] = {**worker.info["guarantee"], "isa": "another"}
    fleet = make_fleet(workers)
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": SAMPLED}
    first, *_, error, end = fleet.post("/generate", body).text.split("\n\n")
    told = json.loads(error.removeprefix("data: "))["error"]
    assert first.startswith("data: ") and end == "" and told["type"] == "worker_died"
    assert "cannot go on elsewhere" in told["message"] and what in told["message"]
    assert all(worker.url in told["message"] for worker in workers)
    assert counted(fleet)["moved_streams_total", "refused"] == 1


@pytest.mark.parametrize("what", NAMED)
def test_a_stream_of_named_events_ends_with_an_error_of_its_api(make_fleet, url, what):
    workers = [CutWorker(url, lambda: 3) for _ in range(2)]
    for worker in workers:
        worker.info["weight_digest"] = "0" * 64
    path, body = NAMED[what]
    *_, last = named_events_of(make_fleet(workers).post(path, body))
    error = last["error"] if what == "message" else last
    assert last["type"] == "error" and "cannot go on elsewhere" in error["message"] and error["retryable"]
    if what == "message":
        assert error["type"] == "api_error"
    else:
        assert last["code"] == "worker_died"


@pytest.mark.parametrize("path", ["/v1/messages", "/sessions/a/v1/messages"])
def test_errors_of_a_router_have_the_shape_of_their_api(make_fleet, path):
    fleet = make_fleet(1)
    fleet.workers[0].answers["/health"] = (503, None)
    fleet.post(f"/workers/{fleet.report(fleet.workers[0])['id']}/disable")
    told = fleet.post(path, {"messages": []}).json()
    assert told["type"] == "error" and told["error"]["type"] in ("overloaded_error", "not_found_error")


def test_a_stream_of_which_nothing_was_delivered_begins_again_with_its_seed(make_fleet, url):
    workers = [CutWorker(url, each) for each in [cuts(0, 0)] * 2]
    fleet = make_fleet(workers)
    for worker in workers:
        worker.info["weight_digest"] = None  # any weights may answer it
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    [*_, last] = events_of(fleet.post("/generate", body))
    sent = [ask for worker in workers for ask in worker.asked("/generate")]
    assert len(sent) == 3 and all(one == sent[0] for one in sent) and "begun" not in sent[0]
    again = httpx.post(f"{url}/generate", json={**sent[0], "stream": False, "progress": False}, timeout=WAIT_S)
    assert again.json()["output_ids"] == last["output_ids"]
    assert counted(fleet)["moved_streams_total", "moved"] == 0


def test_streams_stay_where_they_are_if_the_setting_says_so(cut_fleet):
    fleet = cut_fleet(1, moved_streams="off")
    answer = fleet.post("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": SAMPLED})
    [worker] = [worker for worker in fleet.workers if worker.asked("/generate")]
    assert "progress" not in worker.asked("/generate")[0]
    assert "ended in the middle" in answer.text and "[DONE]" not in answer.text


class SlowWorker(CutWorker):
    """A worker that waits before its first event, or in the middle of its answer's head, until the test lets it go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda: None)
        self.is_slow, self.goes_on, self.has_left = False, threading.Event(), threading.Event()

    def _relay(self, handler: Handler, body: dict) -> None:
        if not self.is_slow:
            super()._relay(handler, body)
            return
        handler.connection.settimeout(WAIT_S)
        if handler.connection.recv(1) == b"":  # the router closes the connection of the one that was slower
            self.has_left.set()
            handler.close_connection = True


def num_hedged(fleet: Fleet) -> float:
    """Return how many requests two workers had."""
    counts = counted(fleet)
    return counts["hedged_requests_total", "first"] + counts["hedged_requests_total", "second"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_waits_goes_to_a_second_worker_too_and_the_first_answer_counts(make_fleet, url, is_streamed):
    workers = [SlowWorker(url) for _ in range(2)]
    fleet = make_fleet(workers, hedge_after_s=0.05)
    workers[0].is_slow = True
    body = {"input_ids": PROMPT, "sampling_params": SAMPLED, "return_logprob": True, "speculation": False, "rid": "a"}
    expected = httpx.post(f"{url}/generate", json=body, timeout=WAIT_S).json()
    while not workers[0].asked("/generate"):
        answer = fleet.post("/generate", {**body, "stream": is_streamed})
        assert answer.headers["x-lockstep-worker"] == workers[1].url
        assert_equal(events_of(answer)[-1] if is_streamed else answer.json(), expected)
    assert workers[0].has_left.wait(WAIT_S)
    num_lost = settled(fleet)["requests_total", "lost", workers[0].url]
    assert num_lost >= 1
    wait_until(lambda: num_hedged(fleet) >= num_lost, "each is counted")  # a moment after the loads are gone
    assert num_hedged(fleet) == num_lost


class FailingWorker(CutWorker):
    """A worker that answers 500. The first one waits until the second has done so, and answers then."""

    def __init__(self, url: str, fails: bool, has_failed: threading.Event) -> None:
        super().__init__(url, lambda: None)
        self.fails, self.has_failed = fails, has_failed

    def _relay(self, handler: Handler, body: dict) -> None:
        if not self.fails:
            assert self.has_failed.wait(WAIT_S)
            super()._relay(handler, body)
            return
        handler.reply(500, {"error": {"message": "broken"}})
        self.has_failed.set()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_of_one_hedged_worker_is_no_answer_while_the_other_may_have_one(make_fleet, url, is_streamed):
    has_failed = threading.Event()
    workers = [FailingWorker(url, fails, has_failed) for fails in (False, True)]
    fleet = make_fleet(workers, hedge_after_s=0.05)
    while not workers[0].asked("/generate"):  # the first of the two that are asked
        answer = fleet.post(
            "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLED, "rid": "a", "stream": is_streamed}
        )
    assert (answer.status_code, answer.headers["x-lockstep-worker"]) == (200, workers[0].url)
    workers[0].fails = True
    assert fleet.post("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLED}).status_code == 500


def test_a_second_worker_of_other_weights_gets_no_hedged_request(make_fleet, url):
    workers = [CutWorker(url, lambda: None) for _ in range(2)]
    workers[1].info["weight_digest"] = "0" * 64
    fleet = make_fleet(workers, hedge_after_s=1e-6)
    for number in range(4):
        fleet.post("/generate", {"input_ids": [*PROMPT, number], "sampling_params": SAMPLED}).raise_for_status()
    counts = counted(fleet)
    assert counts["hedged_requests_total", "first"] == counts["hedged_requests_total", "second"] == 0


def test_a_stream_goes_on_from_target_to_target_without_a_router(url):
    each = cuts(2, 0, 1)
    workers = [CutWorker(url, each) for _ in range(4)]
    targets = [HttpTarget(worker.url) for worker in workers]
    try:
        body = {"input_ids": PROMPT, "stream": True, "rid": "mine", "speculation": False, **GENERATE["samples"]}
        events = [event for event in stream_from(targets, "/generate", body) if event != b"data: [DONE]\n\n"]
        ends = {one.get("index"): one for one in (json.loads(event.removeprefix(b"data: ")) for event in events)}
        whole = httpx.post(f"{url}/generate", json={**body, "stream": False}, timeout=WAIT_S).json()
        for index, expected in enumerate(whole):
            assert_equal(ends[index], {**expected, "index": index})
        assert all(len(worker.asked("/generate")) == 1 for worker in workers)
        workers[1].info["weight_digest"] = "0" * 64
        broken = iter([1])
        workers[0].cuts = lambda: next(broken)
        with pytest.raises(TargetError, match="the digest 0000"):
            list(stream_from(targets[:2], "/generate", body))
    finally:
        for target in targets:
            target.close()
        for worker in workers:
            worker.stop()


def test_a_target_that_refuses_a_request_is_not_followed_by_another_one(url):
    wrong = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": "x"}}
    with closing(HttpTarget(url)) as target, pytest.raises(TargetError, match="max_new_tokens"):
        list(stream_from([target] * 2, "/generate", wrong))
