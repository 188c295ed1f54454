"""Tests of the end of a server: it drains, within its settings, and then it ends firmly."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation.subscriptions import stop_taking
from lockstep.integration.http.server import BackgroundServer
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import PATIENCE, soon, submit, wait_until
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.torture.processor import descendants

ASK = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
LONG = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}}
BOTH_SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]  # they share their code
# A server whose engine is held between two steps for good.
HELD = """
import sys, threading
from lockstep.integration.http import server
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
server._CLOSE_TIMEOUT_S = 0.5
service = RolloutService(Engine(sys.argv[1], EngineConfig(kv_cache=32)))
hold = threading.Thread(target=service.engine.between_steps, args=("hold", threading.Event().wait), daemon=True)
def listens(url):
    hold.start()
    print(url, file=sys.stderr, flush=True)
server.serve(service, HttpConfig(port=0, drain_timeout_s=0.2, shutdown_timeout_s=0.2), listens)
"""


# A server that tells how its garbage collector is set, and ends.
COLLECTING = """
import gc, os, signal, sys
from lockstep.integration.http import server
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
before = gc.get_threshold()
def listens(url):
    print(before[0], gc.get_threshold()[0], gc.get_freeze_count(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
server.serve(RolloutService(Engine(sys.argv[1], EngineConfig(kv_cache=32))), HttpConfig(port=0), listens)
"""


def assert_draining(answer: httpx.Response) -> None:
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "draining"


def test_a_server_that_drains_says_so_refuses_new_requests_and_finishes_open_ones(client, server, service, until):
    service.engine.pause_generation("in_place")
    opened = submit(client.post, "/generate", json=ASK)
    until(lambda: service.engine.state()["num_waiting"] == 1)
    stop_taking(server.app)
    assert_draining(client.post("/generate", json=ASK))
    assert_draining(client.post("/generate", json={**ASK, "stream": True}))
    assert_draining(client.post("/v1/completions", json={"prompt": [5, 6]}))
    assert_draining(client.post("/v1/chat/completions", json={"input_ids": [5, 6]}))
    for path in ("/ready", "/health_generate", "/ping"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
    assert client.get("/health").status_code == 200  # draining is not dead
    assert client.get("/state").json()["draining"] and client.get("/server_info").json()["status"] == "draining"
    assert client.post("/continue_generation").status_code == 200
    answer = soon(opened)
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 3


def test_a_server_that_has_answered_nothing_yet_drains_too(client, server):
    stop_taking(server.app)
    assert_draining(client.post("/generate", json=ASK))


# -- servers in a process ---------------------------------------------------------------------------------------------


@contextmanager
def held(service) -> Iterator[None]:
    """Keep the engine's loop between two steps inside the block."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(PATIENCE)

    holding = submit(service.engine.between_steps, "hold", wait)
    assert entered.wait(PATIENCE)
    try:
        yield
    finally:
        leave.set()
        soon(holding)


def test_a_server_in_a_process_finishes_open_requests_before_it_closes(client, server, service, until):
    with held(service):
        opened = submit(client.post, "/generate", json=ASK)
        until(lambda: getattr(server.app.state, "hub", None) and server.app.state.hub.open)
        closing = submit(server.close)
        until(lambda: client.get("/ready").status_code == 503)
        assert_draining(client.post("/generate", json=ASK))
    answer = soon(opened)
    assert answer.status_code == 200 and answer.json()["meta_info"]["finish_reason"]["type"] == "length"
    soon(closing)


def test_a_server_in_a_process_does_not_wait_for_a_paused_engine(client, server, service, until):
    service.engine.pause_generation("in_place")
    opened = submit(client.post, "/generate", json=ASK)
    until(lambda: service.engine.state()["num_waiting"] == 1)
    server.close()
    assert soon(opened).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_server_in_a_process_closes_after_an_update(client, server, service, tmp_path, until):
    update = {"model_path": str(tmp_path / "model"), "weight_version": "newer"}
    with held(service):
        updating = submit(client.post, "/update_weights_from_disk", json=update)
        until(lambda: server.app.state.updates.age_s is not None)
        closing = submit(server.close)
        until(lambda: client.get("/ready").status_code == 503)
    assert soon(updating).status_code == 200 and service.engine.weight_version == "newer"
    soon(closing)


def test_a_client_that_does_not_read_its_answer_is_cut_off_when_the_server_ends(service, caplog):
    """Its task ends by itself. It would be cancelled, wherever it is, and be logged as an error."""
    endings = []

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield bytes(1 << 20)

    async def long_answer(request: Request) -> Response:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await StreamingResponse(chunks())(scope, receive, send)
            except asyncio.CancelledError:
                endings.append("cancelled")
                raise
            endings.append("the client was gone")

        return run  # type: ignore[return-value]  # an ASGI application, as every response is

    server = BackgroundServer(service, HttpConfig(port=0, shutdown_timeout_s=1, write_timeout_s=PATIENCE))
    server.app.add_route("/long", long_answer)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as client, caplog.at_level(logging.WARNING):
        client.sendall(b"GET /long HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        wait_until(lambda: any(one.flow.write_paused for one in server._server.server_state.connections))
        server.close()
    said = [record.getMessage() for record in caplog.records]
    assert "1 clients do not read their answers: they are cut off, because the server ends" in said
    assert endings == ["the client was gone"]


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from lockstep.tests.support.bpe_tokenizer import train_tokenizer
    from lockstep.tests.support.random_models import random_model

    path = tmp_path_factory.mktemp("model")
    random_model("qwen2", vocab_size=1024).save_pretrained(path)
    train_tokenizer().save_pretrained(path)
    return path


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a Python process that serves; yield it and its url."""
    started = prepared_python.Popen(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert started.stderr is not None
        url = next(line.split()[-1] for line in started.stderr if "http://" in line)
        rest = threading.Thread(target=started.stderr.read, daemon=True)  # a full pipe would stop the process
        rest.start()
        yield started, url
    finally:
        started.kill()
        started.wait()


def serving(folder: Path, engine: str = "", **http: object):
    config = folder / f"serve-{len(os.listdir(folder))}.toml"
    settings = "".join(f"{name} = {value}\n" for name, value in {"port": 0, **http}.items())
    config.write_text(f'[engine]\nkv_cache = "64 blocks"\n{engine}\n[http]\n{settings}')
    return process("-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--config", str(config))


def status_of(url: str, path: str) -> int:
    return httpx.get(url + path, timeout=PATIENCE).status_code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_stream_end_while_new_requests_are_refused(folder, number):
    with serving(folder, drain_timeout_s=60) as (server, url), httpx.Client(timeout=PATIENCE) as client:
        with client.stream("POST", f"{url}/generate", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=PATIENCE)
            server.send_signal(number)
            wait_until(lambda: status_of(url, "/ready") == 503 and '"draining"' in httpx.get(f"{url}/ready").text)
            assert_draining(httpx.post(f"{url}/generate", json=ASK, timeout=PATIENCE))
            assert status_of(url, "/health") == 200
            httpx.post(f"{url}/continue_generation", json={}, timeout=PATIENCE).raise_for_status()
            chunks = [line for line in lines if line]
        assert chunks[-1] == "data: [DONE]" and '"type":"length"' in chunks[-2]
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_queued", [False, True])
def test_a_signal_answers_what_does_not_end_in_time_with_its_output_so_far(folder, is_queued):
    with serving(folder, drain_timeout_s=0.5) as (server, url), httpx.Client(timeout=PATIENCE) as client:
        if is_queued:
            client.post(f"{url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
        opened = submit(httpx.post, f"{url}/generate", json={**LONG}, timeout=PATIENCE)
        name = "num_waiting" if is_queued else "num_running"
        wait_until(lambda: client.get(f"{url}/state").json()[name] == 1)
        if not is_queued:
            client.post(f"{url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
        server.send_signal(signal.SIGTERM)
        answer = soon(opened)
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer.json()["output_ids"]) < 200
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_signal_during_an_update_that_never_ends_is_obeyed_in_time(folder):
    with serving(folder, drain_timeout_s=0.5, shutdown_timeout_s=0.5) as (server, url):
        group = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        joining = submit(httpx.post, f"{url}/init_weights_update_group", json={**group, "backend": "gloo"}, timeout=60)
        wait_until(lambda: httpx.get(f"{url}/state", timeout=PATIENCE).json()["weight_groups"])
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) in (0, 1)
        assert soon(joining).status_code == 503


@pytest.mark.slow
@pytest.mark.parametrize("number", BOTH_SIGNALS)
def test_a_signal_lets_an_update_in_parts_come_to_its_end(folder, number):
    with serving(folder, drain_timeout_s=60) as (server, url), httpx.Client(base_url=url, timeout=PATIENCE) as client:
        client.post("/begin_weight_update", json={}).raise_for_status()
        client.post("/update_weights_from_disk", json={"model_path": str(folder)}).raise_for_status()
        server.send_signal(number)
        wait_until(lambda: client.get("/ready").text.find("draining") > 0)
        ended = client.post("/end_weight_update", json={"weight_version": "newer"})
        assert ended.status_code == 200, ended.text
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_signal_does_not_wait_for_an_update_whose_sender_has_gone(folder):
    with serving(folder, drain_timeout_s=0.5) as (server, url):
        httpx.post(f"{url}/begin_weight_update", json={}, timeout=PATIENCE).raise_for_status()
        opened = submit(httpx.post, f"{url}/generate", json=ASK, timeout=PATIENCE)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert soon(opened).status_code in (200, 503)


@pytest.mark.slow
@pytest.mark.parametrize("number", BOTH_SIGNALS)
def test_a_signal_while_a_grammar_compiles_is_obeyed_in_time(folder, number):
    rules = [f's{i} ::= "a" s{i} | "a" s{i} "a" | "a"' for i in range(1500)]  # many seconds of processor time
    long = "\n".join(["root ::= " + " | ".join(f"s{i}" for i in range(1500)), *rules])
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "ebnf": long}}
    room = "grammar_memory_mb = 65536\ngrammar_timeout_s = 600"  # it is refused otherwise, a second or two later
    with serving(folder, room, drain_timeout_s=0.5, shutdown_timeout_s=0.5) as (server, url):
        opened = submit(httpx.post, f"{url}/generate", json=body, timeout=PATIENCE)
        wait_until(lambda: (helpers := descendants(server.pid)) and any(map(_is_compiling, helpers)))
        watched = [os.pidfd_open(helper) for helper in descendants(server.pid)]
        server.send_signal(number)
        assert server.wait(PATIENCE) == 0
        answer = soon(opened)
        assert answer.status_code == 503, answer.text
        for process in watched:
            assert select.select([process], [], [], PATIENCE)[0], "the process that compiles ends as well"
            os.close(process)


def _is_compiling(pid: int) -> bool:
    """Whether this process has read all of its imports and computes: more than a second of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) > 1.0 * os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_second_signal_ends_the_wait_for_open_requests(folder):
    with serving(folder, drain_timeout_s=600) as (server, url):
        httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=PATIENCE).raise_for_status()
        opened = submit(httpx.post, f"{url}/generate", json=ASK, timeout=PATIENCE)
        wait_until(lambda: httpx.get(f"{url}/state", timeout=PATIENCE).json()["num_waiting"] == 1)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(url, "/ready") == 503 and '"draining"' in httpx.get(f"{url}/ready").text)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert soon(opened).status_code == 200


@pytest.mark.slow
def test_an_engine_that_does_not_answer_does_not_keep_the_process(folder):
    with process("-c", HELD, str(folder)) as (server, url):
        opened = submit(httpx.post, f"{url}/generate", json=ASK, timeout=PATIENCE)
        wait_until(lambda: status_of(url, "/health") == 200)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 1
        assert time.monotonic() - began < PATIENCE / 2
        with pytest.raises(httpx.HTTPError):
            soon(opened).raise_for_status()


@pytest.mark.slow
def test_a_process_that_serves_seldom_looks_for_garbage_among_all_objects(folder):
    """A collection stops all threads: for a queue of thousands of requests, and for all that is imported, for long."""
    done = subprocess.run([sys.executable, "-c", COLLECTING, str(folder)], capture_output=True, text=True, timeout=120)
    before, now, num_frozen = map(int, done.stdout.split())
    assert done.returncode == 0 and now >= 5 * before and num_frozen > 100_000
