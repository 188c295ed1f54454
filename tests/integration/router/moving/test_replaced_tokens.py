"""Streams whose tokens jumps may replace, those of grammars in the mode `text`, stay at a worker that drains."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.router.moving.streaming import stream_from
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.router.cut_workers import CutWorker
from lockstep.tests.integration.router.test_moving import (
    OPENAI,
    PROMPT,
    SAID,
    assert_equal,
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


@pytest.fixture
def replacing_url(make_model, bpe_tokenizer, restore_threads) -> Iterator[str]:
    """Serve a model whose tokens are many characters long, so that jumps replace those that were drawn before them."""
    torch.set_num_threads(1)
    model = make_model("qwen3", vocab_size=1024, eos_token_id=0)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=64), tokenizer=bpe_tokenizer))
    service.name_weights()
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
        service.engine.stop()


@pytest.mark.parametrize("seed", range(3))
def test_it_goes_on_after_any_event_also_where_a_jump_has_replaced_tokens(replacing_url, seed):
    params = {"regex": "(ab|[0-9]{2,5})( value){0,9}", "max_new_tokens": 12, "sampling_seed": seed, "temperature": 0.3}
    body = {"input_ids": [3, 17, 90], "stream": True, "rid": "mine", "speculation": False, "return_logprob": True,
            "sampling_params": params}  # fmt: skip
    undisturbed = events_of(httpx.post(f"{replacing_url}/generate", json=body, timeout=WAIT_S))
    for number in range(1, len(undisturbed)):
        each = iter([number, None])
        workers = [CutWorker(replacing_url, lambda each=each: next(each)) for _ in range(2)]
        targets = [HttpTarget(worker.url) for worker in workers]
        try:
            *_, last, end = stream_from(targets, "/generate", body)
        finally:
            for one in (*targets, *workers):
                one.close() if isinstance(one, HttpTarget) else one.stop()
        assert end == b"data: [DONE]\n\n"
        assert_equal(json.loads(last.removeprefix(b"data: ")), undisturbed[-1])


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
