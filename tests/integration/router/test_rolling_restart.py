"""Restarts of real engines behind a router, one after the other, without a lost request or another bit."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.tests.integration.router.test_engines import START_S, Process, num_routable, wait_until, workers
from lockstep.tests.support.forked_ranks import free_port

pytestmark = pytest.mark.slow

NUM_CLIENTS = 4
NUM_SEEDS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a model."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextmanager
def two_engines(folder: Path, *engine: str) -> Iterator[list[Process]]:
    """Serve the folder twice, with these settings of the engine; both are killed in the end."""
    engines = [
        Process("serve", "--model", str(folder), "--port", str(free_port()), "--engine", *engine) for _ in range(2)
    ]
    try:
        for one in engines:
            one.url = one.ready()
        yield engines
    finally:
        for one in engines:
            one.kill()


@pytest.fixture
def engines(folder) -> Iterator[list[Process]]:
    with two_engines(folder, "kv_cache=200 blocks", "max_num_seqs=8") as engines:
        yield engines


@pytest.fixture
def router(engines, tmp_path) -> Iterator[BackgroundRouter]:
    config = RouterConfig(
        tuple(engine.url for engine in engines), HttpConfig(port=0), journal=tmp_path / "journal.json",
        health_interval_s=0.05, queue_timeout_s=START_S,
    )  # fmt: skip
    with route_in_background(config) as router:
        wait_until(lambda: num_routable(router.url) == 2, "both engines are routable")
        yield router


def body(seed: int, num_tokens: int = 60) -> dict:
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": seed}
    return {"input_ids": [1 + seed, 2, 3], "sampling_params": params, "return_logprob": True}


def bits(answer: dict) -> tuple:
    """Return the tokens of an answer with their log-probabilities."""
    meta = answer["meta_info"]
    return tuple(answer["output_ids"]), tuple(entry[0] for entry in meta["output_token_logprobs"])


def wait_for_answers(router: BackgroundRouter, answers: list, num_answers: int) -> None:
    """Wait until so many requests are answered, with a question to the router for each look."""
    wait_until(lambda: workers(router.url) and len(answers) >= num_answers, "requests are answered")


def test_two_workers_are_restarted_in_turn_under_load_and_every_answer_is_200_and_bit_equal(engines, router):
    with httpx.Client(base_url=router.url, timeout=START_S, verify=False) as http:
        alone = [bits(http.post("/generate", json=body(seed)).json()) for seed in range(NUM_SEEDS)]
        done, answers = threading.Event(), []

        def keep_asking(client: int) -> None:
            number = client
            while not done.is_set():
                seed = number % NUM_SEEDS
                answer = http.post("/generate", json=body(seed))
                answers.append((seed, answer.status_code, answer.headers.get("x-lockstep-worker"), answer.text))
                number += NUM_CLIENTS

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(keep_asking, client) for client in range(NUM_CLIENTS)]
            try:
                for engine in engines:
                    before = len(answers)
                    wait_for_answers(router, answers, before + NUM_CLIENTS)
                    engine.signal(signal.SIGTERM)
                    assert engine.process.wait(START_S) == 0
                    engine.kill()  # closes its log
                    engine.start()
                    engine.ready()
                    wait_until(lambda: num_routable(router.url) == 2, "both engines are routable again")
                before = len(answers)
                wait_for_answers(router, answers, before + 2 * NUM_CLIENTS)
            finally:
                done.set()
            for client in clients:
                client.result(START_S)
    lost = [answer for answer in answers if answer[1] != 200]
    assert lost == [] and {worker for _, _, worker, _ in answers} == {engine.url for engine in engines}
    assert all(bits(json.loads(text)) == alone[seed] for seed, _, _, text in answers)


def test_a_stream_of_a_worker_that_drains_goes_on_elsewhere_at_once(engines, router):
    """The engine says that it drains, refuses new requests, and ends with 0, since its stream has left it."""
    with httpx.Client(base_url=router.url, timeout=START_S, verify=False) as http:
        alone = bits(http.post("/generate", json=body(1, num_tokens=450)).json())
        with http.stream("POST", "/generate", json=body(1, num_tokens=450) | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            url = answer.headers["x-lockstep-worker"]
            [engine] = [engine for engine in engines if engine.url == url]
            # the stream does not end before the router has seen the drain, and never at this engine
            assert http.post(f"{url}/pause_generation", json={"mode": "in_place"}).status_code == 200
            engine.signal(signal.SIGTERM)
            wait_until(lambda: workers(router.url)[url]["status"] == "draining", "the router knows that it drains")
            others = [http.post("/generate", json=body(seed)) for seed in range(4)]
            assert {other.headers["x-lockstep-worker"] for other in others} == {one.url for one in engines} - {url}
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and bits(json.loads(events[-2])) == alone
        assert engine.process.wait(START_S) == 0
        wait_until(lambda: workers(router.url)[url]["status"] == "dead", "it has ended")
