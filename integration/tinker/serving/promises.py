"""Answers that clients fetch later, by the id of their request."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ....rollout.errors import LockstepError
from ....weight_sync.errors import WeightSyncError
from ...http.edge.errors import HttpError, is_expected

logger = logging.getLogger(__name__)

JSON, PROTO = "application/json", "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    """The body of an answer, and headers."""

    body: bytes
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class TooMany(HttpError):
    """The error where clients have to wait before they ask for more: the SDK tries again after a 429."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, code="too_many", headers={"Retry-After": "1"})


def as_json(values: Mapping[str, object]) -> Answer:
    """Return an answer in JSON."""
    return Answer(json.dumps(values).encode())


def failure(error: BaseException) -> Answer:
    """Return the answer to a request that has failed, with the category that the SDK knows: "user" for what the client
    can change, else "server". A bug of ours is logged, and its text not told."""
    if not isinstance(error, Exception) or not is_expected(error):
        logger.error("a request failed", exc_info=error)
        text = f"internal error ({type(error).__name__}); the server's log has the details"
        return as_json({"error": text, "category": "server"})
    is_users = isinstance(error, ValueError | HttpError) and not isinstance(error, LockstepError | WeightSyncError)
    return as_json({"error": str(error), "category": "user" if is_users else "server"})


class Promise:
    """The answer to one request, once it is there. Any thread may set it, once."""

    def __init__(self, request_id: str, body_digest: bytes = b"") -> None:
        self.request_id, self.body_digest = request_id, body_digest
        self.fetched_at: float | None = None  # of time.monotonic
        self._answer: Future[Answer] = Future()

    @property
    def is_done(self) -> bool:
        return self._answer.done()

    def set(self, answer: Answer) -> None:
        """Set the answer, unless it is there."""
        if not self._answer.done():
            self._answer.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """Answer that the request has failed."""
        self.set(failure(error))

    async def wait(self, timeout_s: float) -> Answer | None:
        """Return the answer; None: it did not come in time. Called on the event loop."""
        if not self._answer.done():
            await asyncio.wait([asyncio.wrap_future(self._answer)], timeout=timeout_s)
        if not self._answer.done():
            return None
        self.fetched_at = time.monotonic()
        return self._answer.result()


class Promises:
    """The promises of all sessions, by request. Used on the event loop."""

    def __init__(self, most: int, kept_s: float) -> None:
        """Take the limits: of promises that are open, and of the time for which a fetched answer is kept."""
        self._most, self._kept_s = most, kept_s
        self._promises: dict[str, Promise] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def get(self, request_id: str) -> Promise | None:
        """Return a promise; None: it is not known, or forgotten."""
        return self._promises.get(request_id)

    def add(self, request_id: str, body_digest: bytes) -> Promise:
        """Add a promise. Raises TooMany where too many answers are waited for or not fetched."""
        if len(self._promises) >= self._most:
            self.forget_fetched()
        if len(self._promises) >= self._most:
            raise TooMany(f"{self._most} requests are open (--max-open-requests)")
        promise = self._promises[request_id] = Promise(request_id, body_digest)
        return promise

    def forget_fetched(self) -> None:
        """Forget the answers that were fetched long enough ago."""
        before = time.monotonic() - self._kept_s
        for request_id, one in list(self._promises.items()):
            if one.fetched_at is not None and one.fetched_at < before:
                del self._promises[request_id]

    def forget(self, prefix: str) -> None:
        """Forget the promises whose ids begin so."""
        for request_id in [one for one in self._promises if one.startswith(prefix)]:
            del self._promises[request_id]
