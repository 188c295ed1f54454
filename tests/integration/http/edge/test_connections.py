"""Tests of connections that are silent, slow, many or dropped, over raw sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import h11
import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.connections import Connection
from lockstep.integration.http.edge.reader import Reader
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import PATIENCE, soon, submit
from lockstep.tests.support.random_models import random_model

QUICK = HttpConfig(port=0, head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1, write_timeout_s=0.3)
ASK = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    service = RolloutService(Engine(random_model("qwen3"), EngineConfig(kv_cache=64)))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def quick(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, QUICK) as server:
        yield server


@pytest.fixture(scope="module")
def patient(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, HttpConfig(port=0)) as server:
        yield server


def connect(server: BackgroundServer, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(sent)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    while True:
        try:
            part = connection.recv(1 << 20)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


@pytest.mark.parametrize("lengths", [(b"Content-Length: 2", b"Transfer-Encoding: chunked"),
                                     (b"transfer-encoding: chunked", b"content-length: 12")])  # fmt: skip
def test_a_body_with_two_lengths_is_refused(quick, lengths):
    head = b"\r\n".join([b"POST /flush_cache HTTP/1.1", b"Host: 127.0.0.1", *lengths])
    with connect(quick, head + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n") as connection:
        answer = read_to_end(connection)  # which ends, because the server closes the connection
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert b"either Content-Length or Transfer-Encoding, not both" in answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://127.0.0.1/health", 200),
        (b"HTTP://user@localhost:80/health?a=http://b/c", 200),
        (b"http://127.0.0.1", 200),
        (b"http://127.0.0.1?a", 200),
        (b"http://127.0.0.1/no/such", 404),
        (b"http://evil.example/server_info", 403),  # the target's host counts, whatever the header says
        (b"http:///health", 404),
        (b"ftp://127.0.0.1/health", 404),
    ],
)
def test_a_target_with_its_host_is_read_as_its_path(quick, target, status):
    with connect(quick, b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % target) as connection:
        assert read_to_end(connection).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: a\r\n"])
def test_a_connection_without_a_whole_head_is_closed(quick, sent):
    with connect(quick, sent) as connection:
        assert read_to_end(connection) == b""


def test_a_head_that_comes_byte_by_byte_has_no_longer_time(quick):
    tick = threading.Event()
    with connect(quick, b"GET /health HTTP/1.1\r\nX: ") as connection:
        connection.setblocking(False)
        for _ in range(round(PATIENCE / 0.02)):
            tick.wait(0.02)
            try:
                connection.send(b"x")
                if connection.recv(1) == b"":
                    return
            except BlockingIOError:
                continue
            except OSError:
                return
    raise AssertionError("it was never closed")


def test_a_body_that_does_not_arrive_is_a_408_and_the_connection_ends(quick):
    with connect(quick, HEAD + b'{"input_ids": [') as connection:
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()
    assert b"did not arrive within 0.3 s (body_timeout_s)" in answer


def test_a_connection_that_is_idle_after_an_answer_is_closed(quick):
    with connect(quick, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as connection:
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_that_goes_on_arriving_does_not_keep_the_connection(quick):
    with connect(quick, b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nx") as connection:
        assert read_to_end(connection).startswith(b"HTTP/1.1 404 ")


CHUNKED = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"/generate", b"/nowhere"])  # which waits for the body, and which does not
def test_a_body_in_tiny_chunks_is_refused_and_the_connection_ends(quick, path, until):
    connections = quick.app.state.connections
    with connect(quick, CHUNKED.replace(b"/generate", path) + b"1\r\n \r\n" * 1001) as connection:
        answer = read_to_end(connection)
    if path == b"/generate":
        assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer.lower()
        assert b"1001 chunks of a body have fewer than 16 bytes on average" in answer
    until(lambda: connections.num_open == 0)


def test_the_chunks_of_a_body_are_read_in_turns():
    """Each takes long for its few bytes, and many connections may send some at once."""
    reader = Reader(1 << 14, 100)
    reader.receive_data(CHUNKED + b"1\r\n \r\n" * 200 + b"0\r\n\r\n")
    assert isinstance(reader.next_event(), h11.Request)
    found = []
    for _ in range(5):
        reader.begin_turn()
        assert not reader.is_interrupted
        turn = []
        while (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            turn.append(event)
        found.append((len(turn), reader.is_interrupted))
        if not reader.is_interrupted:
            break
    assert found == [(64, True), (64, True), (64, True), (9, False)]


def test_connections_that_come_together_are_accepted_a_few_at_a_time(patient, monkeypatch):
    """A report would wait for all of them otherwise."""
    accepted, passes = [], []
    made = Connection.connection_made

    def connection_made(self, transport) -> None:
        accepted.append(len(passes))
        made(self, transport)

    run_once = asyncio.BaseEventLoop._run_once

    def run(self) -> None:
        passes.append(1)
        run_once(self)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", run)
    hold, held = threading.Event(), threading.Event()

    def stand() -> None:
        held.set()
        hold.wait(PATIENCE)

    loop = patient._server.servers[0].get_loop()
    loop.call_soon_threadsafe(stand)
    assert held.wait(PATIENCE)
    connections = [connect(patient) for _ in range(100)]  # all are in the kernel's queue
    hold.set()
    for connection in connections:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")
        connection.close()
    a_pass = Counter(accepted)
    assert sum(a_pass.values()) == 100
    assert max(a_pass.values()) <= 32, "of two accepting callbacks at most"


def test_a_body_in_many_chunks_that_are_not_tiny_is_read(quick):
    chunk = b"11\r\n%s\r\n" % (b" " * 17)
    with connect(quick, CHUNKED + b"2\r\n{}\r\n" + chunk * 5000 + b"0\r\n\r\n") as connection:
        assert b"exactly one of text and input_ids is needed" in read_to_end(connection)


@pytest.mark.parametrize(
    "headers",
    [b"a:\r\n" * 100, b"X: " + b"x" * (1 << 14) + b"\r\n", b"a:\n" * 100, b"a:\r\n" * 3000],
    ids=["many", "long", "newlines", "very many"],
)
def test_a_head_that_is_too_long_or_has_too_many_headers_is_a_431(quick, headers):
    with connect(quick, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers + b"\r\n") as connection:
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"16384 bytes (max_head_bytes), or has more than 100 headers (max_headers)" in answer


def test_a_head_within_its_limits_is_read_beside_a_body_of_many_lines(quick):
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"a:\r\n" * 98
    with connect(quick, head + b"Content-Length: 5002\r\n\r\n{}" + b"\n" * 5000) as connection:
        assert b"exactly one of text and input_ids is needed" in read_to_end(connection)


def test_a_connection_reads_a_little_at_a_time(quick, monkeypatch):
    sizes, receive = [], Connection.data_received
    monkeypatch.setattr(Connection, "data_received", lambda self, data: (sizes.append(len(data)), receive(self, data)))
    body = b"{}" + b" " * (1 << 20)
    with connect(quick, HEAD.replace(b"1000", b"%d" % len(body)) + body) as connection:
        assert b"exactly one of text and input_ids is needed" in read_to_end(connection)
    assert sum(sizes) > 1 << 20 and max(sizes) <= 1 << 14


def test_a_client_that_reads_nothing_of_its_answers_is_cut_off(quick, until):
    asks = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2000
    connections = quick.app.state.connections
    until(lambda: connections.num_open == 0)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", quick.port))
        connection.sendall(asks)
        until(lambda: connections.num_open == 1)
        until(lambda: connections.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_take_long_are_not_cut_by_the_deadlines(quick, service, until, stream):
    service.engine.pause_generation("in_place")
    asked = submit(httpx.post, f"{quick.url}/generate", json={**ASK, "stream": stream}, timeout=PATIENCE)
    until(lambda: service.engine.state()["num_waiting"] == 1)
    for sent in (b"", HEAD):  # as long as both deadlines take
        with connect(quick, sent) as connection:
            read_to_end(connection)
    service.engine.continue_generation()
    answer = soon(asked)
    assert answer.status_code == 200 and (b"[DONE]" in answer.content) == stream


def test_beyond_the_number_of_connections_the_oldest_idle_one_gives_way_and_then_new_ones_are_refused(service, until):
    with serve_in_background(service, HttpConfig(port=0, max_connections=5)) as server:
        connections = server.app.state.connections
        idle = [connect(server) for _ in range(5)]
        until(lambda: connections.num_open == 5)
        assert httpx.get(f"{server.url}/health", headers={"Connection": "close"}).status_code == 200
        assert read_to_end(idle[0]) == b""
        service.engine.pause_generation("in_place")
        asked = [submit(httpx.post, f"{server.url}/generate", json=ASK, timeout=PATIENCE) for _ in range(5)]
        until(lambda: service.engine.state()["num_waiting"] == 5)
        with connect(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as refused:
            answer = read_to_end(refused)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in answer and b"(max_connections)" in answer
        service.engine.continue_generation()
        assert [soon(one).status_code for one in asked] == [200] * 5
        for connection in idle:
            connection.close()


def test_a_thousand_connections_that_are_dropped_leave_no_descriptor_and_no_thread(service, until):
    body = b'{"input_ids": [5, 6]}'
    whole = HEAD.replace(b"1000", str(len(body)).encode()) + body
    with serve_in_background(service, HttpConfig(port=0)) as server:
        assert httpx.post(f"{server.url}/generate", json=ASK, timeout=PATIENCE).status_code == 200
        connections = server.app.state.connections
        until(lambda: connections.num_open == 0)
        num_files, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for index in range(1000):
            connect(server, (b"", b"GET /he", HEAD, HEAD + b"{", whole)[index % 5]).close()
        until(lambda: connections.num_open == 0 and not server.app.state.hub.open)
        assert httpx.post(f"{server.url}/generate", json=ASK, timeout=PATIENCE).status_code == 200
        until(lambda: connections.num_open == 0)
        assert len(os.listdir("/proc/self/fd")) <= num_files + 2
        assert threading.active_count() <= num_threads + 4  # of the pools, which are made when they are first used
        until(lambda: service.engine.state()["num_running"] + service.engine.state()["num_waiting"] == 0)
        service.engine.check_integrity()


def test_the_event_loop_is_asyncios_where_uvloop_is_installed(service, monkeypatch, tmp_path) -> None:
    """Other packages of an environment bring uvloop (vLLM, verl, `uvicorn[standard]`), which uvicorn then prefers."""
    (tmp_path / "uvloop.py").write_text("def new_event_loop():\n    raise AssertionError('a loop of uvloop')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with serve_in_background(service, HttpConfig(port=0)) as server:
        assert httpx.post(f"{server.url}/generate", json=ASK, timeout=PATIENCE).status_code == 200
