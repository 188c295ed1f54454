"""Tests of prompts that the context has room for, and the KV pool has not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template
from lockstep.tests.support.random_models import random_model

BLOCKS, SIZE = 8, 16
POOL = BLOCKS * SIZE
LONG = "a" * (POOL + 1)
SAID = [{"role": "user", "content": LONG}]
WIRES = {
    "/generate": {"text": LONG},
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": LONG},
    "/inference/v1/generate": {"token_ids": [5] * (POOL + 1), "sampling_params": {"max_tokens": 1}},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    config = EngineConfig(kv_cache=BLOCKS, block_size=SIZE)
    service = RolloutService(Engine(model, config, tokenizer=byte_tokenizer(chat_template("hermes"))))
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
        service.engine.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WIRES)
def test_a_prompt_that_the_pool_has_no_room_for_is_too_long_for_the_context(client, path, stream):
    answer = client.post(path, json=WIRES[path] | {"stream": stream})
    assert answer.status_code == 400 and f"({POOL} tokens, as the KV pool has room for no more)" in answer.text
    assert f"maximum context length is {POOL} tokens" in answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_is_told_to_shorten_its_history(client, stream):
    answer = client.post("/v1/messages", json={"messages": SAID, "max_tokens": 3, "stream": stream})
    assert answer.status_code == 400 and "prompt is too long: " in answer.json()["error"]["message"]
    assert f"> {POOL} maximum" in answer.json()["error"]["message"]


def test_a_prompt_of_the_pools_tokens_can_run_and_has_one_more_token(client):
    for ids in ([7] * POOL, [7] * (POOL + 5)):
        body = {"prompt": ids, "max_tokens": 9, "truncate_prompt_tokens": -1, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == POOL and answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"
    scored = client.post("/generate", json={"input_ids": [7] * POOL, "sampling_params": {"max_new_tokens": 0}})
    assert scored.json()["meta_info"]["prompt_tokens"] == POOL


def test_clients_that_ask_are_told_the_context_that_the_pool_has_room_for(client):
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == POOL
    assert client.get("/get_server_info").json()["scheduler_info"]["max_req_input_len"] == POOL
    assert client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == POOL


def test_a_grammar_of_a_prompt_that_is_too_long_is_not_compiled(client):
    body = {"text": LONG, "sampling_params": {"regex": "never seen ("}}
    assert "KV pool" in client.post("/generate", json=body).text, "and not the fault of the grammar"


def test_an_answer_that_fills_the_pool_has_exceeded_the_context_of_an_agent(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "ignore_eos": True}
    assert client.post("/v1/messages", json=body).json()["stop_reason"] == "model_context_window_exceeded"
    streamed = client.post("/v1/messages", json=body | {"stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    [ended] = [event for event in events if event["type"] == "message_delta"]
    assert ended["delta"]["stop_reason"] == "model_context_window_exceeded"
