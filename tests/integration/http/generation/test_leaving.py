"""Tests of clients that leave in each phase of their request: nothing of them stays, and others are served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import PATIENCE, held_between_steps
from lockstep.tests.support.random_models import random_model

LONG = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
LATEST_S = 10.0  # generous, since other tests share the cores; the torture suite measures against 2 s
SHORT = {**LONG, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    model = random_model("qwen3", max_position_embeddings=1024)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=128, max_num_seqs=4, chunked_prefill_size=4)))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def running(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, HttpConfig(port=0)) as server:
        assert httpx.post(f"{server.url}/generate", json={"input_ids": [5]}, timeout=PATIENCE).status_code == 200
        yield server


@pytest.fixture
def server(running, service, until) -> Iterator[BackgroundServer]:
    """Yield a server. After the test no request is left, and another client is served."""
    yield running
    service.engine.continue_generation()
    until(lambda: not running.app.state.hub.open and service.engine.state()["num_waiting"] == 0)
    until(lambda: service.engine.state()["num_running"] == 0)
    service.engine.check_integrity()
    until(lambda: len(service.engine.mailboxes) == 0)  # they are closed after the requests have ended
    ask = {"input_ids": [5, 6], "sampling_params": SHORT}
    assert httpx.post(f"{running.url}/generate", json=ask, timeout=PATIENCE).status_code == 200


def ask(server: BackgroundServer, **body: object) -> socket.socket:
    """Send a request of a client that may leave."""
    data = json.dumps({"input_ids": [5, 6], "sampling_params": LONG, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_while_its_request_is_queued(server, service, until, stream):
    service.engine.pause_generation("in_place")
    connection = ask(server, stream=stream)
    until(lambda: service.engine.state()["num_waiting"] == 1)
    connection.close()
    until(lambda: service.engine.state()["num_waiting"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_during_prefill(server, service, until, stream):
    num_steps = service.engine.metrics.num_steps
    connection = ask(server, input_ids=[5, 6, 7] * 200, stream=stream)
    until(lambda: service.engine.metrics.num_steps > num_steps + 1)
    connection.close()
    until(lambda: not server.app.state.hub.open and service.engine.state()["num_running"] == 0)
    assert service.engine.metrics.num_steps < num_steps + 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_during_decode(server, service, until, stream):
    num_steps, num_aborted = service.engine.metrics.num_steps, service.engine.metrics.num_aborted
    connection = ask(server, stream=stream, sampling_params={**LONG, "n": 2})
    if stream:
        assert connection.recv(1 << 16)
    until(lambda: service.engine.metrics.num_steps > num_steps + 3)
    service.engine.pause_generation("in_place")
    connection.close()
    until(lambda: service.engine.metrics.num_aborted == num_aborted + 2)


def test_a_client_leaves_while_its_grammar_is_compiled(server, service, until, monkeypatch):
    compiling, asked = Future(), []
    monkeypatch.setattr(service.engine.requests, "ask_grammars", lambda params: asked.append(1) or [compiling])
    connection = ask(server)
    until(lambda: asked)
    connection.close()
    until(lambda: not server.app.state.hub.open)
    assert not service.engine.has_work
    monkeypatch.undo()
    compiling.set_result(None)


def test_a_client_leaves_while_an_update_holds_the_engine(server, service, until):
    with held_between_steps(service.engine):
        connection = ask(server)
        until(lambda: server.app.state.hub.open)
        connection.close()
        until(lambda: not server.app.state.hub.open)


def test_a_client_leaves_before_its_body_has_arrived(server, until, caplog):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: server.app.state.open_bodies.num_bytes == 1)
    connection.close()
    until(lambda: server.app.state.open_bodies.num_bytes == 0)
    assert not caplog.records  # no ordinary client fills the log


@pytest.mark.slow
def test_ten_thousand_queued_requests_leave_the_server_responsive_and_go_when_their_clients_do(server, service, until):
    service.engine.pause_generation("in_place")
    url, latest = server.url, [0.0]
    # Each of 100 clients has 100 prompts; most have left before the engine goes on.
    batch = {"input_ids": [[5, 6, 7]] * 100, "sampling_params": SHORT}
    leaving = [ask(server, **batch) for _ in range(90)]
    with ThreadPoolExecutor(10) as pool, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        staying = [pool.submit(httpx.post, f"{url}/generate", json=batch, timeout=120) for _ in range(10)]

        def look() -> dict:
            for path in ("/health", "/state"):
                began = time.monotonic()
                answer = client.get(path)
                latest[0] = max(latest[0], time.monotonic() - began)
            return answer.json()

        until(lambda: look()["num_waiting"] == 10_000)
        for connection in leaving:
            connection.close()
        until(lambda: look()["num_waiting"] == 1_000)
        service.engine.continue_generation()
        until(lambda: look()["num_waiting"] == 0)
        assert all(future.result().status_code == 200 for future in staying)
    assert latest[0] < LATEST_S
