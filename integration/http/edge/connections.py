"""Connections of a server, with deadlines and a limit of their number.

A head has a deadline, and a client that reads nothing of its answer. A body has its own (`bodies.arrived`), and the
wait for an answer has none: pauses and streams may take hours. What a connection sends is read in small parts, between
which the event loop serves the others.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import HttpConfig
from .reader import Reader

_NUM_DESCRIPTORS = 1 << 16  # that a server asks the system for
_READ_BYTES = 1 << 14  # that are read and handled at a time
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 47\r\n\r\ntoo many connections are open (max_connections)"
)


def ask_for_descriptors() -> None:
    """Raise this process's limit of open files as far as the system allows; a connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_NUM_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connections:
    """The open connections of one server."""

    def __init__(self, config: HttpConfig, descriptors_each: int = 1) -> None:
        """Take the limits. descriptors_each: of this process, that a connection needs: a router's two."""
        self.head_timeout_s, self.write_timeout_s = config.head_timeout_s, config.write_timeout_s
        self.max_head_bytes, self.max_headers = config.max_head_bytes, config.max_headers
        num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_limited = num_descriptors != resource.RLIM_INFINITY
        most = num_descriptors * 3 // 4 // descriptors_each
        self.limit = min(config.max_connections, most) if is_limited else config.max_connections
        self.num_open = 0
        self.idle: dict[Connection, None] = {}  # without a request, in the order in which they became idle

    def protocol(self) -> Callable[..., Connection]:
        """Return the protocol for uvicorn's setting `http`."""
        return partial(Connection, self)


class Connection(H11Protocol):
    """A connection that closes itself when its client is too slow."""

    def __init__(self, all: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = all
        self.conn: Reader = Reader(all.max_head_bytes, all.max_headers)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._next_turn: asyncio.Handle | None = None  # for what has arrived and is not handled yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports of sockets
        everyone = self._all
        everyone.num_open += 1
        if everyone.num_open > everyone.limit:
            if not everyone.idle:
                transport.write(_REFUSAL)
                transport.close()
                return
            oldest = next(iter(everyone.idle))
            everyone.idle.pop(oldest)
            oldest.transport.abort()
        self._follow()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def handle_events(self) -> None:
        """Handle what has arrived, the tiny chunks of a body in turns, between which nothing more is read."""
        self.conn.begin_turn()
        super().handle_events()
        if self.conn.is_interrupted and not self.transport.is_closing():
            self.transport.pause_reading()
            if self._next_turn is None:
                self._next_turn = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_turn = None
        if self.transport.is_closing():
            return
        self.handle_events()
        if self._next_turn is None and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP or over a limit, unless an answer has begun, and close the connection."""
        if self._has_request:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self.transport.write(self.conn.refusal())
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._all.idle.pop(self, None)  # it is the newest idle one now
            if not self._has_request:
                self._all.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.num_open -= 1
        self._all.idle.pop(self, None)
        self._stop_timers()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._all.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _follow(self) -> None:
        """Begin or end the wait for a head. Further bytes do not prolong it."""
        if self._has_request or self.transport.is_closing():
            self._all.idle.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        else:
            self._all.idle.setdefault(self)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self._all.head_timeout_s, self.transport.abort)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
