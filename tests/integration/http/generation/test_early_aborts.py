"""Aborts of requests that the engine has not got yet: they end as those do that wait in its queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation.tokenising import Tokenising
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import PATIENCE, soon, submit
from lockstep.tests.support.random_models import random_model

SLOW = "SLOW the"
LONG = {"max_new_tokens": 400, "ignore_eos": True}
MANY_STATES = "(a|b|c|[d-z]{1,900}){1,9}[0-9]{1,900}x"


@pytest.fixture
def url(bpe_tokenizer, restore_threads) -> Iterator[str]:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=len(bpe_tokenizer))
    service = RolloutService(Engine(model, EngineConfig(kv_cache=300), tokenizer=bpe_tokenizer))
    service.name_weights()  # for requests that move here
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
    service.close()


@pytest.fixture
def held(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Hold the tokenising of SLOW; returns the events of its begin and of its end."""
    begun, may_end, tokenise = threading.Event(), threading.Event(), Tokenising._ids

    def slowly(self: Tokenising, prompt: object, *arguments: object, **named: object) -> list[int]:
        if prompt == SLOW:
            begun.set()
            assert may_end.wait(PATIENCE)
        return tokenise(self, prompt, *arguments, **named)

    monkeypatch.setattr(Tokenising, "_ids", slowly)
    return begun, may_end


def post(url: str, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=PATIENCE)


def asking(url: str, path: str = "/generate", **fields: object) -> Future[httpx.Response]:
    return submit(post, url, path, {"text": SLOW, "rid": "mine", "sampling_params": LONG, **fields})


ABORTS: dict[str, Callable[[str], object]] = {
    "by id": lambda url: post(url, "/abort_request", {"rid": "mine"}),
    "all": lambda url: post(url, "/abort_request", {"abort_all": True}),
    "a pause": lambda url: post(url, "/pause_generation", {"mode": "abort"}),
    "all, as vLLM": lambda url: post(url, "/abort_requests", {}),
    "by id, as vLLM": lambda url: post(url, "/abort_requests", {"request_ids": ["mine"]}),
    "a pause, as vLLM": lambda url: post(url, "/pause", {}),
    "by id, the verb": lambda url: post(url, "/lockstep/abort_request", {"rid": "mine"}),
    "all, the verb": lambda url: post(url, "/lockstep/abort_request", {"abort_all": True}),
    "a pause, the verb": lambda url: post(url, "/lockstep/pause_generation", {"mode": "abort"}),
}


def moved(url: str) -> dict[str, object]:
    """Return the fields of a request that goes on here, of which its client has nothing yet."""
    info = httpx.get(f"{url}/server_info").json()
    told = {name: info[name] for name in ("weight_digest", "guarantee")}
    return {"default_seed": 11, "begun": {"sequences": [None], "head": {"rids": ["mine"]}, **told}}


@pytest.mark.parametrize("is_moved", [False, True], ids=["new", "moved"])
@pytest.mark.parametrize("abort", ABORTS.values(), ids=ABORTS)
def test_a_request_whose_prompt_is_tokenised_meanwhile_is_aborted(url, held, abort, is_moved):
    begun, may_end = held
    asked = asking(url, **(moved(url) if is_moved else {}))
    assert begun.wait(PATIENCE)
    abort(url).raise_for_status()
    may_end.set()
    post(url, "/continue_generation", {}).raise_for_status()
    meta = soon(asked).json()["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] == 0


def test_a_pause_of_another_mode_aborts_no_request_that_is_tokenised(url, held):
    begun, may_end = held
    asked = asking(url)
    assert begun.wait(PATIENCE)
    post(url, "/lockstep/pause_generation", {}).raise_for_status()
    may_end.set()
    post(url, "/lockstep/continue_generation", {}).raise_for_status()
    assert soon(asked).json()["meta_info"]["completion_tokens"] == 400


def test_other_requests_and_those_that_come_later_are_not(url, held):
    begun, may_end = held
    asked = asking(url)
    assert begun.wait(PATIENCE)
    post(url, "/abort_request", {"rid": "another"}).raise_for_status()
    may_end.set()
    assert soon(asked).json()["meta_info"]["completion_tokens"] == 400
    later = post(url, "/generate", {"text": "the", "rid": "another", "sampling_params": LONG})
    assert later.json()["meta_info"]["completion_tokens"] == 400


@pytest.mark.parametrize("is_moved", [False, True], ids=["new", "moved"])
def test_a_request_whose_grammar_is_compiled_meanwhile_is_answered_at_once(url, monkeypatch, is_moved):
    from lockstep.integration.http.generation import subscriptions

    waits = threading.Event()
    compiled = subscriptions.are_compiled

    def noted(*arguments: Any) -> object:
        waits.set()
        return compiled(*arguments)

    monkeypatch.setattr(subscriptions, "are_compiled", noted)
    params = {"max_new_tokens": 30, "regex": MANY_STATES}
    asked = asking(url, text="the", sampling_params=params, **(moved(url) if is_moved else {}))
    assert waits.wait(PATIENCE)
    post(url, "/abort_request", {"rid": "mine", "abort_message": "enough"}).raise_for_status()
    answer = soon(asked).json()
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "enough")
    assert (answer["text"], answer["output_ids"]) == ("", [])  # no token is drawn without the grammar
