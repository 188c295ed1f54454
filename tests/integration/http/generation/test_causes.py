"""Tests of how answers tell why they were aborted, on every wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import PATIENCE, soon, submit
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template
from lockstep.tests.support.random_models import random_model

SAID = [{"role": "user", "content": "hi"}]
WIRES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 500},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/messages": {"messages": SAID, "max_tokens": 500},
    "/v1/responses": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 500}},
}
KEEPS = {  # more than the server allows
    "custom_params": {"return_top_p_token_ids": True}, "return_meta_info": True, "top_p": 0.99,
}  # fmt: skip
TOO_MANY = "the filters kept more than 1 tokens to report (max_kept_ids)"


class Served(NamedTuple):
    engine: Engine
    client: httpx.Client


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    engine = Engine(model, EngineConfig(kv_cache=64), tokenizer=byte_tokenizer(chat_template("hermes")))
    service = RolloutService(engine)
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0, max_kept_token_ids=1)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield Served(engine, client)
        engine.stop()


def told(path: str, answer: httpx.Response) -> dict[str, Any]:
    """Return the part of an answer that says how it ended, streamed or not."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        found = answer.json()
        return found["choices"][0] if "choices" in found else found
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == "/v1/messages":
        return next({**event, **event["delta"]} for event in events if event["type"] == "message_delta")
    if path == "/v1/responses":
        return events[-1]["response"]
    return next(choice for event in events for choice in event["choices"] if choice["finish_reason"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WIRES)
def test_an_answer_that_a_caller_aborts_has_the_callers_message(served, until, path, stream):
    engine, client = served
    engine.pause_generation("in_place")
    try:
        asked = submit(client.post, path, json=WIRES[path] | {"stream": stream})
        until(lambda: engine.state()["num_waiting"] == 1)
        client.post("/abort_request", json={"abort_all": True, "abort_message": "enough of it"}).raise_for_status()
    finally:
        engine.continue_generation()
    end = told(path, soon(asked))
    assert end["finish_message"] == "enough of it" and "aborted_by" not in end
    if path == "/v1/messages":
        assert end["stop_reason"] == "pause_turn"
    else:
        assert end["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in WIRES if path != "/inference/v1/generate"])
def test_an_answer_that_the_engine_aborts_says_why_and_asks_no_agent_to_go_on(served, path, stream):
    end = told(path, served.client.post(path, json=WIRES[path] | KEEPS | {"stream": stream}))
    assert (end["finish_message"], end["aborted_by"]) == (TOO_MANY, "engine")
    assert end.get("stop_reason", "max_tokens") == "max_tokens"


@pytest.mark.parametrize("path", WIRES)
def test_an_answer_that_ends_by_itself_has_no_message(served, path):
    few = {"max_output_tokens": 2} if path == "/v1/responses" else {"max_tokens": 2}
    body = WIRES[path] | ({"sampling_params": few} if "token_ids" in WIRES[path] else few)
    assert "finish_message" not in told(path, served.client.post(path, json=body))
