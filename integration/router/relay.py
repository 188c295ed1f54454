"""The client's side of an answer that is forwarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Protocol

import httpx
from starlette.types import Send

from .calls import returned
from .counters import Outcome, outcome_of
from .fleet.worker import Worker
from .wire import WorkerFailed, words_of

WORKER_HEADER = b"x-lockstep-worker"
_LONGEST_S = 3600.0  # of a Retry-After


class Unavailable(Exception):
    """The worker answered that it takes no requests now."""


class Drains(Unavailable):
    """The worker answered that it finishes its open requests and takes no new ones."""


class Full(Unavailable):
    """The worker answered that too much waits there already. `retry_after_s`: its own word on when to ask again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Claim(Protocol):
    """The right to answer the client."""

    def is_wanted(self, relay: Relay) -> bool:
        """Return whether another attempt may still deliver."""

    def take(self, relay: Relay) -> bool:
        """Claim the client's connection. Returns whether this attempt has it."""


class Relay:
    """The client's side of one attempt."""

    def __init__(self, send: Send, worker: Worker, path: str, is_last: bool) -> None:
        """Begin. path: of the call, whose API its errors have."""
        self._send, self._path = send, path
        self.worker = worker
        self.is_last = is_last
        self.claim: Claim | None = None  # on the client, where another worker may have it
        self.has_begun = False
        self._at_event = True  # the client has a whole number of events, so one more can follow
        self._is_stream = False
        self.outcome = Outcome.CLIENT_LEFT  # the outcome if the attempt is cancelled

    @property
    def can_go_on(self) -> bool:
        """Whether further events can follow what the client has."""
        return self.has_begun and self._is_stream and self._at_event

    def beside(self, worker: Worker) -> Relay:
        """Return the client's side of an attempt at the same time."""
        return Relay(self._send, worker, self._path, is_last=False)

    def lose(self) -> None:
        """Note that another attempt has delivered first."""
        self.outcome = Outcome.LOST

    def at(self, worker: Worker) -> Relay:
        """Return the client's side of the next attempt, which goes on with the same answer."""
        relay = Relay(self._send, worker, self._path, is_last=False)
        relay.has_begun, relay._is_stream = self.has_begun, self._is_stream
        return relay

    async def whole(self, answer: httpx.Response, body: bytes) -> None:
        """Send a complete answer."""
        # Set before the send, because the client may close the connection as soon as it has all bytes.
        self.outcome = outcome_of(answer.status_code)
        await self._start(answer, len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def part(self, answer: httpx.Response, part: bytes, num_bytes: int | None = None) -> None:
        """Send a part of a long answer. num_bytes: length of the whole answer, if the worker has declared it."""
        if not self.has_begun:
            await self._start(answer, num_bytes)
        self._at_event = False
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def events(self, answer: httpx.Response, events: bytes) -> None:
        """Send the bytes of a stream up to the end of an event."""
        if not self.has_begun:
            await self._start(answer, None)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._at_event = True

    async def end(self, answer: httpx.Response, rest: bytes) -> None:
        """Send the rest of a stream or of a long answer, and end it."""
        if not self.has_begun:
            await self._start(answer, None)
        self.outcome = outcome_of(answer.status_code)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def finish(self, events: bytes = b"") -> None:
        """End a stream whose last event the client has, or gets with these."""
        self.outcome = Outcome.ANSWERED
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, message: str, outcome: Outcome, *, retryable: bool = True) -> None:
        """End an answer that has begun: a stream with an error event; anything else stays incomplete, so that the
        server closes the connection and the client sees that a part is missing."""
        self.outcome = outcome
        if not self.can_go_on:
            return
        error = {"message": message, "type": "worker_died", "param": None, "code": 502, "retryable": retryable}
        await self._send({"type": "http.response.body", "body": _error_event(self._path, error), "more_body": False})

    async def _start(self, answer: httpx.Response, num_bytes: int | None) -> None:
        if self.claim is not None and answer.status_code >= 500 and self.claim.is_wanted(self):
            raise WorkerFailed(f"it answered {answer.status_code}")
        if self.claim is not None and not self.claim.take(self):
            self.lose()
            raise asyncio.CancelledError  # as the attempt that has the client will do to this one
        headers = returned(answer.headers.raw, self.worker.url)  # bytes, because a worker may send any
        if num_bytes is not None:
            headers.append((b"content-length", b"%d" % num_bytes))
        headers.append((WORKER_HEADER, self.worker.url.encode("ascii", "backslashreplace")))
        self.has_begun, self._is_stream = True, is_stream(answer)
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": headers})


def _error_event(path: str, error: Mapping[str, object]) -> bytes:
    """Make the event of an error in the middle of a stream, as the API of its path has it."""
    if path == "/v1/messages":
        value: dict[str, object] = {"type": "error", "error": {**error, "type": "api_error"}}
    elif path == "/v1/responses":
        value = {**error, "type": "error", "code": "worker_died"}
    else:
        return f"data: {json.dumps({'error': error})}\n\n".encode()
    return f"event: error\ndata: {json.dumps(value)}\n\n".encode()


def is_stream(answer: httpx.Response) -> bool:
    """Return whether an answer is a stream of events."""
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def refusal(body: bytes, retry_after: str = "") -> Unavailable:
    """Return the error for a worker's 503 with this body and this Retry-After."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    words = words_of(values)
    if "draining" in words:
        return Drains("it is draining")
    why = f"it answered 503: {body[:200].decode(errors='replace')}"
    if "overloaded" in words:
        seconds = float(retry_after) if retry_after.isdecimal() else 1.0
        return Full(why, min(max(1.0, seconds), _LONGEST_S))
    return Unavailable(why)
