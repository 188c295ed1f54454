"""Token ids over HTTP: what is long is named, encoded and sent without the event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation.encoding import Encoder
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import PATIENCE
from lockstep.tests.support.random_models import random_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=128, max_position_embeddings=32768)
    return Engine(model, EngineConfig(kv_cache="8 blocks"), tokenizer=build_tokenizer())


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    service = RolloutService(engine)
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
    service.close()


def names_of(engine: Engine, ids: list[int]) -> list[str]:
    assert engine.tokenizer is not None
    return engine.tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("num", [4, 20_000])
def test_tokens_have_their_names_where_these_are_asked_for(url, engine, num):
    for wants in (False, True):
        asked = {"prompt": "1+" * (num // 2), "add_special_tokens": False, "return_token_strs": wants}
        found = httpx.post(f"{url}/tokenize", json=asked, timeout=PATIENCE).raise_for_status().json()
        assert found["count"] == len(found["tokens"]) == num and found["max_model_len"] == engine.max_prompt_len
        assert found["token_strs"] == (names_of(engine, found["tokens"]) if wants else None)


def test_more_tokens_than_the_pool_has_room_for_have_a_text(url, engine):
    assert engine.max_prompt_len < 200
    body = httpx.post(f"{url}/detokenize", json={"tokens": [5] * 200}, timeout=PATIENCE).raise_for_status().json()
    assert body["text"] == engine.tokenizer.decode([5] * 200)


def test_a_long_answer_is_made_by_threads_and_not_by_the_event_loop(url, engine, monkeypatch):
    naming, encoding, in_loop = set[str](), set[str](), set[str]()
    named, run = engine.tokenizer.convert_ids_to_tokens, Encoder.run

    def convert(ids: list[int]) -> list[str]:
        assert len(ids) < 20_000  # others run between the slices
        naming.add(threading.current_thread().name)
        return named(ids)

    async def noted(self: Encoder, make: Any, cost: int) -> bytes:
        in_loop.add(threading.current_thread().name)

        def made() -> bytes:
            encoding.add(threading.current_thread().name)
            return make()

        return await run(self, made, cost)

    monkeypatch.setattr(engine.tokenizer, "convert_ids_to_tokens", convert)
    monkeypatch.setattr(Encoder, "run", noted)
    asked = {"prompt": "1+" * 10_000, "return_token_strs": True}
    httpx.post(f"{url}/tokenize", json=asked, timeout=PATIENCE).raise_for_status()
    assert naming and encoding and in_loop and not (naming | encoding) & in_loop
