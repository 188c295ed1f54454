"""Streams that are aborted between two workers end as at a worker that aborts them, with what the client has."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lockstep.tests.integration.router.cut_workers import CutWorker
from lockstep.tests.integration.router.test_moving import (
    GENERATE,
    LENGTH,
    PROMPT,
    STREAMS,
    events_of,
    merged,
    url,  # noqa: F401
    without,
)
from lockstep.tests.support.fake_workers import WAIT_S, Fleet, counted, wait_until

pytestmark = pytest.mark.slow


def aborted(make_fleet, url: str, path: str, body: dict, num_events: int, **settings: object) -> httpx.Response:  # noqa: F811
    """Return the answer to a stream that loses its worker after some events, and is aborted before it has another."""

    def cut() -> int:
        workers[0].is_loading = True  # it is not well again: the stream waits for a worker
        return num_events

    workers = [CutWorker(url, cut), CutWorker(url, lambda: None)]
    fleet: Fleet = make_fleet(workers, **settings)
    fleet.post(f"/workers/{fleet.report(workers[1])['id']}/disable")  # it hears of aborts
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.post, f"{fleet.router.url}{path}", json=body, timeout=WAIT_S)
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
        wait_until(lambda: fleet.report(workers[0])["status"] == "dead", "its worker is lost")
        assert fleet.post("/abort_request", {"abort_all": True, "abort_message": "enough"}).status_code == 200
        answer = asking.result(WAIT_S)
    assert len(workers[0].asked(path)) == 1 and not workers[1].asked(path)
    assert counted(fleet)["moved_streams_total", "aborted"] == 1
    return answer


@pytest.mark.parametrize("what", ["generate", "completions", "chat", "tokens"])
def test_a_stream_between_two_workers_is_aborted_by_the_id_that_a_worker_gave_it(make_fleet, url, what):  # noqa: F811
    def cut() -> int:
        worker.is_loading = True  # it is not well again: the stream waits for a worker
        return 2

    worker = CutWorker(url, cut)
    fleet: Fleet = make_fleet([worker, CutWorker(url, lambda: None)])
    fleet.post(f"/workers/{fleet.report(fleet.workers[1])['id']}/disable")  # it hears of aborts
    params = {"max_new_tokens": LENGTH, "ignore_eos": True}
    path, body = STREAMS.get(what, ("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": params}))
    with httpx.stream("POST", f"{fleet.router.url}{path}", json=body, timeout=WAIT_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines).removeprefix("data: "))
        given = first.get("id") or first.get("request_id") or first["meta_info"]["id"]
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
        wait_until(lambda: fleet.report(worker)["status"] == "dead", "its worker is lost")
        assert fleet.post("/abort_request", {"rid": f"{given}-of another one"}).status_code == 200
        assert fleet.stats()["num_held_requests"] == 1
        assert fleet.post("/abort_request", {"rid": given}).status_code == 200
        wait_until(lambda: fleet.stats()["num_held_requests"] == 0, "it waits no more")
        ends = [json.loads(line.removeprefix("data: ")) for line in lines]
    said = [end["choices"][0] if end.get("choices") else end.get("meta_info", {}) for end in ends]
    assert any("abort" in json.dumps(one.get("finish_reason")) for one in said)
    assert counted(fleet)["moved_streams_total", "aborted"] == 1


def test_a_stream_that_lacks_only_its_end_is_aborted_by_its_id_too(make_fleet, url):  # noqa: F811
    def cut() -> int:
        worker.is_loading = True
        return 2

    worker = CutWorker(url, cut)
    fleet: Fleet = make_fleet([worker])
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    with httpx.stream("POST", f"{fleet.router.url}/generate", json=body, timeout=WAIT_S) as answer:
        lines = filter(None, answer.iter_lines())
        given = json.loads(next(lines).removeprefix("data: "))["meta_info"]["id"]
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
        wait_until(lambda: fleet.report(worker)["status"] == "dead", "its worker is lost")
        assert fleet.post("/abort_request", {"rid": given}).json()["aborted"] == 1
        *_, last, done = lines
    assert done == "data: [DONE]" and "length" in json.dumps(json.loads(last.removeprefix("data: ")))


@pytest.mark.parametrize("what", ["log-probabilities", "samples", "a list"])
def test_an_aborted_stream_of_generate_ends_with_the_output_so_far(make_fleet, url, what):  # noqa: F811
    body = {"input_ids": PROMPT, "stream": True, **GENERATE.get(what, GENERATE["plain"])}
    if what == "a list":
        body["input_ids"] = [PROMPT, PROMPT[:2]]
    events = events_of(aborted(make_fleet, url, "/generate", body, 2))
    ends = [event for event in events if event["meta_info"]["finish_reason"]]
    num = {"samples": 3, "a list": 2}.get(what, 1)
    assert [event.get("index", 0) for event in ends] == list(range(num))
    given = {event.get("index", 0): event for event in events[: -len(ends)]}
    names = {event["meta_info"]["id"] for event in ends}
    assert len(names) == num and {event["meta_info"]["id"] for event in given.values()} <= names
    for index, event in enumerate(ends):
        meta, before = event["meta_info"], given.get(index, {"output_ids": [], "text": "", "meta_info": {}})
        assert meta["finish_reason"]["type"] == "abort" and meta["finish_reason"]["message"] == "enough"
        assert (event["output_ids"], event["text"]) == (before["output_ids"], before["text"])
        logprobs = meta.get("output_token_logprobs", [])
        assert logprobs == before["meta_info"].get("output_token_logprobs", [])
        assert meta["completion_tokens"] == len(event["output_ids"])
        spans = [(one["version"], one["start"], one["end"]) for one in meta["weight_versions"]]
        assert spans == ([("default", 0, len(event["output_ids"]))] if event["output_ids"] else [])


@pytest.mark.parametrize("what", ["completions", "completions with ids", "chat", "chat with samples", "tokens"])
def test_an_aborted_stream_of_new_output_ends_each_choice_and_counts_its_tokens(make_fleet, url, what):  # noqa: F811
    path, body = STREAMS[what]
    num = body.get("n", body.get("sampling_params", {}).get("n", 1))
    events = events_of(aborted(make_fleet, url, path, body, 2 * num))
    own = {"choices", "usage", "prompt_token_ids"}
    assert len({json.dumps(without(event, own), sort_keys=True) for event in events}) == 1
    *_, last = events
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] > 0
    assert 0 < last["usage"]["completion_tokens"] < num * LENGTH
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert [(choice["index"], choice["finish_reason"]) for choice in ends] == [(at, "abort") for at in range(num)]
    whole = merged(events)
    if what in ("completions with ids", "tokens"):
        assert sum(len(one["token_ids"]) for one in whole.values()) == last["usage"]["completion_tokens"]


def test_an_aborted_stream_whose_events_were_too_large_to_keep_ends_with_an_error_that_calls_for_no_retry(
    make_fleet, url  # noqa: F811
):  # fmt: skip
    body = {"input_ids": PROMPT, "stream": True, **GENERATE["log-probabilities"]}
    answer = aborted(make_fleet, url, "/generate", body, 2, max_kept_answer_bytes=1600)
    *_, error, end = answer.text.split("\n\n")
    told = json.loads(error.removeprefix("data: "))["error"]
    assert end == "" and told["retryable"] is False and "was aborted: enough" in told["message"]
