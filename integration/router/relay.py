"""The client's side of an answer that is forwarded."""

from __future__ import annotations

import json

import httpx
from starlette.types import Send

from .calls import NOT_RETURNED
from .counters import Outcome, outcome_of
from .fleet.workers import Worker

WORKER_HEADER = "x-lockstep-worker"


class Unavailable(Exception):
    """The worker answered that it takes no requests now."""


class Relay:
    """The client's side of one attempt."""

    def __init__(self, send: Send, worker: Worker, is_last: bool) -> None:
        self._send = send
        self._worker = worker
        self._is_last = is_last
        self.has_begun = False
        self.outcome = Outcome.CLIENT_LEFT  # the outcome if the attempt is cancelled

    async def whole(self, answer: httpx.Response, body: bytes) -> None:
        """Send a complete answer. Raises Unavailable for a 503, unless this is the last attempt."""
        if answer.status_code == 503 and not self._is_last:
            raise Unavailable(f"it answered 503: {body[:200].decode(errors='replace')}")
        # Set before the send, because the client may close the connection as soon as it has all bytes.
        self.outcome = outcome_of(answer.status_code)
        await self._start(answer, [("content-length", str(len(body)))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def events(self, answer: httpx.Response, events: bytes) -> None:
        """Send complete events of a stream."""
        if not self.has_begun:
            await self._start(answer, [])
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, answer: httpx.Response, rest: bytes) -> None:
        """Send the rest of a stream, and end it."""
        if not self.has_begun:
            await self._start(answer, [])
        self.outcome = outcome_of(answer.status_code)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def fail(self, message: str, outcome: Outcome) -> None:
        """End a stream with an error event, if it has begun."""
        self.outcome = outcome
        if not self.has_begun:
            return
        error = {"message": message, "type": "worker_died", "param": None, "code": 502, "retryable": True}
        event = f"data: {json.dumps({'error': error})}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, answer: httpx.Response, more: list[tuple[str, str]]) -> None:
        kept = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in NOT_RETURNED]
        headers = [*kept, *more, (WORKER_HEADER, self._worker.url)]
        self.has_begun = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": raw})
