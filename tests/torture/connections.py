"""Connections that are opened and dropped, half-sent requests, and clients that leave in every phase."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

from lockstep.tests.torture.attackers import Attacker
from lockstep.tests.torture.patterns import valid
from lockstep.tests.torture.wire import request_bytes

NUM_AT_A_TIME = 200
POST = b"POST /generate HTTP/1.1\r\nHost: h\r\n"
HALVES = (b"", b"G", POST, POST + b"X: " + b"a" * 9000, POST + b"Content-Length: 1000\r\n\r\n{",
          b"\x16\x03\x01\x02\x00\x01", POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
          b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")  # fmt: skip


class Connections(Attacker):
    """Open many connections, send nothing or the half of a request, and drop them."""

    name = "connections"

    def step(self, draw: random.Random) -> None:
        kind = draw.choice(["flood", "hold", "drip", "pipeline", "chunks", "heads"])
        half = draw.choice(HALVES)
        sent = self.wire.record.open(self.name, self.wire.step, f"{kind} {half[:30]!r}", half)
        try:
            getattr(self, f"_{kind}")(draw, half)
        except OSError as error:
            self.wire.record.close(sent, type(error).__name__)
            self.scene.over.wait(0.2)
        else:
            self.wire.record.close(sent, "done")

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.scene.address.place, timeout=5)

    def _flood(self, draw: random.Random, half: bytes) -> None:
        """Open and drop connections one after the other, some with a reset."""
        for _ in range(250):
            with self._connect() as connection:
                if half:
                    connection.sendall(half)
                if draw.random() < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    def _hold(self, draw: random.Random, half: bytes) -> None:
        """Hold connections for a while."""
        with ExitStack() as stack:
            for _ in range(NUM_AT_A_TIME):
                connection = stack.enter_context(self._connect())
                if half:
                    connection.sendall(half)
            self.scene.over.wait(draw.choice([0.1, 2.0]))

    def _drip(self, draw: random.Random, half: bytes) -> None:
        """Send a request byte after byte, and leave before its end."""
        whole = request_bytes("POST", "/generate", json.dumps({"text": "a"}).encode(), self.scene.address.api_key)
        with self._connect() as connection:
            for at in range(draw.randrange(len(whole))):
                connection.sendall(whole[at : at + 1])
                if self.scene.over.wait(0.01):
                    return

    def _pipeline(self, draw: random.Random, half: bytes) -> None:
        """Send many requests without reading an answer."""
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 2}}).encode()
        one = request_bytes("POST", "/generate", body, self.scene.address.api_key, close=False)
        with self._connect() as connection:
            connection.sendall(one * draw.choice([2, 30]) + half)
            self.scene.over.wait(draw.random())

    def _chunks(self, draw: random.Random, half: bytes) -> None:
        """Send bodies in chunks of a few bytes on several connections, as much as the server reads in a moment."""
        piece = b"1\r\n \r\n" if draw.random() < 0.7 else b"11\r\n" + b" " * 17 + b"\r\n"
        with ExitStack() as stack:
            open_ones = [stack.enter_context(self._connect()) for _ in range(draw.choice([1, 10]))]
            for connection in open_ones:
                connection.sendall(self._head(b"Transfer-Encoding: chunked") + b"\r\n")
                connection.settimeout(0.2)
            for connection in open_ones * 4:
                with suppress(TimeoutError, ConnectionError):  # it reads no more, or has refused them
                    connection.sendall(piece * 10_000)

    def _heads(self, draw: random.Random, half: bytes) -> None:
        """Send heads with many headers, or one that is long, without a key."""
        lines = draw.choice([b"a:\r\n" * 14_000, b"a:\r\n" * 3000, b"a: b\r\n" * 99, b"a: " + b"b" * 60_000 + b"\r\n"])
        for _ in range(draw.choice([1, 60])):
            with self._connect() as connection, suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n")
                connection.recv(100)

    def _head(self, *headers: bytes) -> bytes:
        """Build the head of a generation without its last line."""
        key = b"Authorization: Bearer " + self.scene.address.api_key.encode()
        return b"\r\n".join([b"POST /generate HTTP/1.1", b"Host: h", key, *headers]) + b"\r\n"


class Leavers(Attacker):
    """Ask for something and leave: while queued, in prefill, in decode, in a stream, while a grammar compiles."""

    name = "leavers"
    num_lanes = 2

    def step(self, draw: random.Random) -> None:
        path, body = self._asked(draw)
        data = request_bytes("POST", path, json.dumps(body).encode(), self.scene.address.api_key)
        count, leaves_after_s = draw.choice([1, 4, 24]), draw.choice([0.0, 0.01, 0.1, 0.5, 1.5])
        sent = self.wire.record.open(self.name, self.wire.step, f"{count} leave {path} after {leaves_after_s} s", data)
        try:
            with ExitStack() as stack:
                place = self.scene.address.place
                peers = [stack.enter_context(socket.create_connection(place, timeout=5)) for _ in range(count)]
                for peer in peers:
                    peer.sendall(data)
                self._read(peers[0], draw.choice([0, 1, 5]), leaves_after_s)
        except OSError as error:
            self.wire.record.close(sent, type(error).__name__)
            self.scene.over.wait(0.2)
        else:
            self.wire.record.close(sent, "left")

    def _asked(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        params: dict[str, Any] = {"max_new_tokens": draw.choice([1, 50, 400]), "ignore_eos": draw.random() < 0.5,
                                  "n": draw.choice([1, 1, 8])}  # fmt: skip
        if draw.random() < 0.4:
            params |= valid(draw)
        prompt = [draw.randrange(2, 200) for _ in range(draw.choice([1, 40, 400]))]
        body = {"input_ids": prompt, "sampling_params": params, "stream": draw.random() < 0.5, "return_logprob": True}
        if draw.random() < 0.7:
            return "/generate", body
        return "/v1/completions", {"model": "", "prompt": prompt, "max_tokens": 50, "stream": True}

    def _read(self, peer: socket.socket, num_reads: int, longest_s: float) -> None:
        """Read a few pieces of an answer, or wait; returns after `longest_s` at the latest."""
        end = time.monotonic() + longest_s
        peer.settimeout(max(longest_s, 0.001))
        try:
            for _ in range(num_reads):
                if not peer.recv(4096):
                    return
        except TimeoutError:
            return
        self.scene.over.wait(max(0.0, end - time.monotonic()))
