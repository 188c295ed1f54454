"""Tests of the connections that clients of weight updates keep open."""

from __future__ import annotations

import json
import socket
import struct

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.tests.support.callers import wait_until

SOON_S = 20.0


def attend(url: str, client: str, body: bytes | None = None) -> socket.socket:
    """Open a connection over a raw socket. Returns it when the answer's first bytes are there."""
    sent = body if body is not None else b'{"client": "%s"}' % client.encode()
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port), timeout=SOON_S)
    head = f"POST /lockstep/attend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(sent)}\r\n\r\n"
    connection.sendall(head.encode() + sent)
    answer = b""
    while b"attended" not in answer:
        part = connection.recv(4096)
        assert part, answer
        answer += part
    return connection


def reset(connection: socket.socket) -> None:
    """Close as a process does that is killed with unread bytes: by RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def pause(client: httpx.Client, name: str, status: int = 200) -> httpx.Response:
    answer = client.post("/lockstep/pause_generation", json={"mode": "retract", "client": name, "keeps_other": True})
    assert answer.status_code == status, answer.text
    return answer


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_what_a_client_has_begun_ends_with_its_connection_however_that_closes(service, server, client, how):
    connection = attend(server.url, "one")
    pause(client, "one")
    begun = client.post("/lockstep/begin_weight_update", json={"weight_version": "1", "client": "one"})
    assert begun.status_code == 200 and service.sessions.client == "one" and service.engine.is_paused
    {"close": connection.close, "reset": lambda: reset(connection),
     "half": lambda: connection.shutdown(socket.SHUT_WR)}[how]()  # fmt: skip
    wait_until(lambda: not service.engine.is_paused, SOON_S)
    assert service.state()["weight_update"]["state"] == "rolled_back"
    assert "its client one is gone" in service.state()["weight_update"]["why"]
    assert "one is gone" in pause(client, "one", 400).json()["message"]  # one that was under way comes too late
    assert not service.engine.is_paused
    connection.close()


def test_a_connection_of_a_long_update_is_never_idle(service, server, client, monkeypatch):
    monkeypatch.setattr("lockstep.integration.http.edge.disconnect.HEARTBEAT_S", 0.02)
    connection, answer = attend(server.url, "one"), b""
    pause(client, "one")
    while answer.count(b"1\r\n\n\r\n") < 3:  # chunks of one byte, as HTTP writes them
        part = connection.recv(4096)
        assert part, answer
        answer += part
    assert service.engine.is_paused
    connection.close()
    wait_until(lambda: not service.engine.is_paused, SOON_S)


def test_the_end_of_one_client_leaves_the_pause_and_the_session_of_others(service, server, client):
    mine, other = attend(server.url, "mine"), attend(server.url, "other")
    pause(client, "mine")
    pause(client, "other")
    client.post("/lockstep/begin_weight_update", json={"client": "mine"}).raise_for_status()
    refused = client.post("/lockstep/begin_weight_update", json={"client": "other"})
    assert refused.status_code == 400 and "already open, that of mine" in refused.json()["message"]
    reset(other)
    again = {"client": "other", "keeps_other": True}  # or it would take the pause over, as long as it is not gone
    wait_until(lambda: "other is gone" in client.post("/lockstep/pause_generation", json=again).text, SOON_S)
    assert service.engine.is_paused and service.sessions.client == "mine"
    mine.close()
    wait_until(lambda: not service.engine.is_paused and service.sessions.client is None, SOON_S)


@pytest.mark.parametrize("name", ["a\nWARNING forged", "\ud800", "\x1b[2J", ""])
def test_a_name_that_would_forge_lines_of_a_log_is_refused(server, client, name):
    for verb in ("attend", "pause_generation", "begin_weight_update"):
        sent = json.dumps({"client": name}).encode()
        answer = client.post(f"/lockstep/{verb}", content=sent, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "client" in answer.text, (verb, answer.text)


def test_a_hundred_connections_that_come_and_are_killed_leave_nothing(service, server, client):
    for at in range(100):
        connection = attend(server.url, f"client {at}")
        if at % 3 == 0:
            pause(client, f"client {at}")
        reset(connection)
    wait_until(lambda: not service.engine.is_paused, SOON_S)
    wait_until(lambda: server.app.state.connections.num_open <= 1, SOON_S)
    assert (
        client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).status_code == 200
    )


@pytest.mark.parametrize("body", [{}, {"client": ""}, {"client": ["one"]}, {"client": "x" * 201}, {"client": None}])
def test_a_client_without_a_usable_name_is_refused(client, body):
    assert client.post("/lockstep/attend", json=body).status_code == 400


def test_a_server_that_ends_does_not_wait_for_its_clients_and_continues_what_they_paused(service):
    with serve_in_background(service, HttpConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
        connection = attend(server.url, "one")
        pause(client, "one")
    wait_until(lambda: not service.engine.is_paused, SOON_S)
    connection.close()
