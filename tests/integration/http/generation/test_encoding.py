"""Tests of where answers are made: long ones in a thread, short ones on the event loop, a few in each of its passes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation import generate
from lockstep.integration.http.generation.encoding import QUICK_COST, Encoder, chunk_cost, encode
from lockstep.integration.http.generation.generate import GenerateReply, StreamedAnswer
from lockstep.integration.http.generation.meta import Wanted
from lockstep.integration.http.openai import format as openai_format
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.completion import StreamChunk

PATIENCE = 60.0
IN_THREAD = "lockstep-answers_0"
LONG = {"input_ids": list(range(4, 64)), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 16,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}  # fmt: skip


@pytest.fixture(scope="module")
def service(small_service) -> RolloutService:
    return small_service


@pytest.fixture(scope="module")
def server(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, HttpConfig(port=0)) as server:
        yield server


def noted(monkeypatch, module, name) -> list[str]:
    """Note the thread of every call of a function."""
    threads, original = [], getattr(module, name)

    def call(*args: object, **options: object) -> object:
        threads.append(threading.current_thread().name)
        return original(*args, **options)

    monkeypatch.setattr(module, name, call)
    return threads


def events_of(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_is_made_in_a_thread_whole_or_as_the_last_event(server, monkeypatch, stream):
    threads = noted(monkeypatch, generate, "meta_info")
    answer = httpx.post(f"{server.url}/generate", json={**LONG, "stream": stream}, timeout=PATIENCE)
    last = events_of(answer)[-1] if stream else answer.json()
    assert threads == [IN_THREAD]
    assert len(last["meta_info"]["input_top_logprobs"]) == 60


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_tokens_make_an_answer_long(server, monkeypatch, stream):
    """Decoding a token takes ten times as long as encoding its log-probability."""
    threads = noted(monkeypatch, generate, "meta_info")
    ask = {**LONG, "top_logprobs_num": 2, "stream": stream}  # 200 log-probabilities, about
    assert httpx.post(f"{server.url}/generate", json=ask, timeout=PATIENCE).status_code == 200
    ask["return_text_in_logprobs"] = True
    assert httpx.post(f"{server.url}/generate", json=ask, timeout=PATIENCE).status_code == 200
    assert threads[0] != IN_THREAD and threads[1] == IN_THREAD


def test_a_long_chunk_of_openais_is_made_in_a_thread(server, monkeypatch):
    threads = noted(monkeypatch, openai_format, "chat_logprobs")
    ask = {"input_ids": [5, 6], "logprobs": True, "top_logprobs": 60, "max_tokens": 1, "stream": True}
    events_of(httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=PATIENCE))
    assert threads == [IN_THREAD]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_decoded_once_and_not_on_the_event_loop(server, service, monkeypatch, stream):
    ids, decoded = list(range(4, 64)), []
    original = type(service.engine.tokenizer).decode

    def decode(self: object, ids_: list[int], *args: object, **options: object) -> str:
        if list(ids_) == ids:
            decoded.append(threading.current_thread().name)
        return original(self, ids_, *args, **options)

    expected = original(service.engine.tokenizer, ids, skip_special_tokens=True)
    monkeypatch.setattr(type(service.engine.tokenizer), "decode", decode)
    ask = {"prompt": ids, "n": 8, "max_tokens": 1, "echo": True, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=PATIENCE)
    choices = events_of(answer)[:8] if stream else [{"choices": [one]} for one in answer.json()["choices"]]
    assert len(decoded) == 1 and decoded[0].startswith("lockstep-intake")
    assert [event["choices"][0]["index"] for event in choices] == list(range(8))
    assert all(event["choices"][0]["text"].startswith(expected) for event in choices)


@pytest.mark.parametrize("value", [[], [1], [{"a": [1, None]}, "é"], {"a": [{"b": 1.5}]}, "x"])
def test_what_is_encoded_is_the_value(value):
    expected = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    assert encode(value) == expected
    assert not (isinstance(value, list) and value)


# -- the encoder ----------------------------------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_is_an_escape():
    for value in ({"a": ["x\ud800y", "\\", "ü🏔"]}, ["\udc00"]):
        told = encode(value.copy())
        assert json.loads(told.decode()) == value and rb"\ud" in told


def busy(duration_s: float = 0.002) -> bytes:
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        pass
    return b"made"


def test_all_short_answers_together_take_a_few_milliseconds_of_each_pass_of_the_event_loop():
    async def run() -> None:
        encoder, made, most = Encoder(), [], 0

        def make() -> bytes:
            made.append(1)
            return busy()

        asking = [asyncio.ensure_future(encoder.run(make, 1)) for _ in range(50)]
        while not all(one.done() for one in asking):
            before = len(made)
            await asyncio.sleep(0)
            most = max(most, len(made) - before)
        assert len(made) == 50 and {one.result() for one in asking} == {b"made"}
        assert most <= 6  # two turns, where one pass holds the end of the first and the begin of the second

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_what_waits_for_its_turn_goes_with_its_client_and_gets_its_own_error():
    async def run() -> None:
        encoder, made = Encoder(), []

        def fail() -> bytes:
            raise ValueError("mine")

        first = [asyncio.ensure_future(encoder.run(busy, 1)) for _ in range(5)]
        gone = asyncio.ensure_future(encoder.run(lambda: made.append(1) or b"", 1))
        failing = asyncio.ensure_future(encoder.run(fail, 1))
        last = asyncio.ensure_future(encoder.run(busy, 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*first, last)
        with pytest.raises(ValueError, match="mine"):
            await failing
        assert not made

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_job_of_the_thread_whose_client_leaves_is_not_run_and_not_kept():
    async def run() -> None:
        encoder, go_on, made = Encoder(), threading.Event(), []
        first = asyncio.ensure_future(encoder.run(lambda: bytes(go_on.wait(PATIENCE)), QUICK_COST + 1))
        second = asyncio.ensure_future(encoder.run(lambda: made.append(1) or b"", QUICK_COST + 1))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first
        assert await encoder.run(lambda: b"third", QUICK_COST + 1) == b"third" and not made

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_an_event_that_repeats_a_long_output_is_made_in_the_thread():
    answer = StreamedAnswer(Wanted(logprobs=True, top=True), None)
    chunk = StreamChunk("a", 0, (5,), (-0.5,), "x", top_logprobs=(tuple((-0.125, id) for id in range(100)),))
    assert chunk_cost(chunk, has_texts=False) == 101 and chunk_cost(chunk, has_texts=True) == 1010
    assert answer.cost([chunk]) <= QUICK_COST
    for number in range(1, 201):
        shown = json.loads(answer.event([chunk], 0.0).removeprefix(b"data: "))
        assert len(shown["meta_info"]["output_top_logprobs"]) == len(shown["output_ids"]) == number
    assert answer.cost([chunk]) > QUICK_COST


def test_an_answer_of_many_prompts_asks_once_what_it_costs(small_service, monkeypatch):
    """It looks at every prompt: once for each answer was seconds of the event loop for thousands of them."""
    looked, cost = [], GenerateReply.cost
    monkeypatch.setattr(GenerateReply, "cost", lambda reply, given: looked.append(len(given)) or cost(reply, given))
    body = {"input_ids": [[5, 6]] * 40, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    with serve_in_background(small_service, HttpConfig(port=0)) as server:
        answers = httpx.post(server.url + "/generate", json=body, timeout=30).raise_for_status().json()
    assert len(answers) == 40 and looked == [40]
