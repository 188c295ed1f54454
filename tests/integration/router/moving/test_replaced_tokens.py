"""Streams whose tokens jumps may replace, those of grammars in the mode `text`, stay at a worker that drains."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lockstep.tests.integration.router.cut_workers import CutWorker
from lockstep.tests.integration.router.test_moving import (
    OPENAI,
    PROMPT,
    SAID,
    events_of,
    merged,
    url,  # noqa: F401
)
from lockstep.tests.support.fake_workers import WAIT_S, Handler, counted, wait_until

pytestmark = pytest.mark.slow

GRAMMAR = "(12|3)4567(89){0,9}(\\+[0-9]{1,3}=){3}"
STREAMS = {
    "generate": ("/generate", {
        "input_ids": PROMPT, "stream": True,
        "sampling_params": {"regex": GRAMMAR, "max_new_tokens": 60, "sampling_seed": 3},
    }),
    "completions": ("/v1/completions", {**OPENAI, "prompt": PROMPT, "regex": GRAMMAR, "ignore_eos": False}),
    "chat": ("/v1/chat/completions", {**OPENAI, "messages": SAID, "regex": GRAMMAR, "ignore_eos": False, "n": 2}),
}  # fmt: skip


class WaitingWorker(CutWorker):
    """A worker that waits in the middle of its streams until the test lets it go on."""

    def __init__(self, url: str) -> None:  # noqa: F811
        super().__init__(url, lambda: None)
        self.num_parts = 0
        self.is_in_the_middle, self.goes_on = threading.Event(), threading.Event()

    def _relay(self, handler: Handler, body: dict) -> None:
        send_part = handler.send_part

        def waits(part: bytes) -> None:
            send_part(part)
            self.num_parts += 1
            if self.num_parts == 4:
                self.is_in_the_middle.set()
                assert self.goes_on.wait(WAIT_S)

        handler.send_part = waits
        super()._relay(handler, body)


def text_of(events: list[dict]) -> object:
    """Return what a client reads in a stream's events."""
    if "choices" not in events[0]:
        return events[-1]["text"], events[-1]["output_ids"]
    return merged(events)


@pytest.mark.parametrize("what", STREAMS)
def test_it_comes_to_its_end_at_a_worker_that_drains(make_fleet, url, what):  # noqa: F811
    path, body = STREAMS[what]
    workers = [WaitingWorker(url), CutWorker(url, lambda: None)]
    fleet = make_fleet(workers)
    fleet.post(f"/workers/{fleet.report(workers[1])['id']}/disable")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(fleet.post, path, body)
        assert workers[0].is_in_the_middle.wait(WAIT_S)
        fleet.post(f"/workers/{fleet.report(workers[1])['id']}/enable")
        workers[0].is_draining = True
        wait_until(lambda: fleet.report(workers[0])["status"] == "draining", "it is draining")
        workers[0].goes_on.set()
        events = events_of(asking.result(WAIT_S))
    assert not any("error" in event for event in events)
    assert not workers[1].asked(path), "no other worker could go on with it"
    undisturbed = events_of(httpx.post(f"{url}{path}", json=body, timeout=WAIT_S))
    assert text_of(events) == text_of(undisturbed)


def test_where_its_worker_dies_another_one_goes_on_with_it(make_fleet, url):  # noqa: F811
    path, body = STREAMS["completions"]
    each = iter([1, 2, 1, None])
    fleet = make_fleet([CutWorker(url, lambda: next(each)) for _ in range(2)])
    moved = events_of(fleet.post(path, body))
    assert text_of(moved) == text_of(events_of(httpx.post(f"{url}{path}", json=body, timeout=WAIT_S)))
    assert counted(fleet)["moved_streams_total", "moved"] == 3


def test_a_token_that_comes_out_otherwise_is_named_with_the_doubt(url):  # noqa: F811
    info = httpx.get(f"{url}/server_info").json()
    one = {"token_ids": [1], "logprobs": [-0.5], "num_chars": 1, "spans": [["default", info["weight_digest"], 0]]}
    begun = {"sequences": [one], "weight_digest": info["weight_digest"], "guarantee": info["guarantee"],
             "head": {"rids": ["a"]}}  # fmt: skip
    params = {"regex": GRAMMAR, "sampling_seed": 3}
    body = {"input_ids": PROMPT, "sampling_params": params, "begun": begun}
    answer = httpx.post(f"{url}/generate", json=body, timeout=WAIT_S)
    message = answer.json()["message"]
    assert answer.status_code == 409 and "not proven" in message and "jump_forward is text" in message, answer.text
