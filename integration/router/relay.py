"""The client's side of an answer that is forwarded."""

from __future__ import annotations

import json

import httpx
from starlette.types import Send

from .calls import returned
from .counters import Outcome, outcome_of
from .fleet.workers import Worker

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


class Relay:
    """The client's side of one attempt."""

    def __init__(self, send: Send, worker: Worker, is_last: bool) -> None:
        self._send = send
        self._worker = worker
        self.is_last = is_last
        self.has_begun = False
        self._at_event = False  # the client has a whole number of events, so one more can follow
        self.outcome = Outcome.CLIENT_LEFT  # the outcome if the attempt is cancelled

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
        await self.part(answer, events)
        self._at_event = True

    async def end(self, answer: httpx.Response, rest: bytes) -> None:
        """Send the rest of a stream or of a long answer, and end it."""
        if not self.has_begun:
            await self._start(answer, None)
        self.outcome = outcome_of(answer.status_code)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def fail(self, message: str, outcome: Outcome) -> None:
        """End an answer that has begun: a stream with an error event; anything else stays incomplete, so that the
        server closes the connection and the client sees that a part is missing."""
        self.outcome = outcome
        if not (self.has_begun and self._at_event):
            return
        error = {"message": message, "type": "worker_died", "param": None, "code": 502, "retryable": True}
        event = f"data: {json.dumps({'error': error})}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, answer: httpx.Response, num_bytes: int | None) -> None:
        headers = returned(answer.headers.raw)  # bytes, because a worker may send any
        if num_bytes is not None:
            headers.append((b"content-length", b"%d" % num_bytes))
        headers.append((WORKER_HEADER, self._worker.url.encode("ascii", "backslashreplace")))
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": headers})


def refusal(body: bytes, retry_after: str = "") -> Unavailable:
    """Return the error for a worker's 503 with this body and this Retry-After."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    told = values if isinstance(values, dict) else {}
    error = told.get("error")
    words = [told.get("status"), told.get("code")]
    words += [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    if "draining" in words:
        return Drains("it is draining")
    why = f"it answered 503: {body[:200].decode(errors='replace')}"
    if "overloaded" in words:
        seconds = float(retry_after) if retry_after.isdecimal() else 1.0
        return Full(why, min(max(1.0, seconds), _LONGEST_S))
    return Unavailable(why)
