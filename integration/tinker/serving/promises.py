"""Answers that clients fetch later, by the id of their request."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

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
    in_json: Callable[[], Mapping[str, object]] | None = None  # makes the same answer for SDKs that read no other

    def accepted_by(self, accept: str) -> Answer:
        """Return the answer in a form that a client accepts. accept: its header."""
        if self.in_json is None or PROTO in accept:
            return self
        return replace(as_json(self.in_json()), headers=self.headers)


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

    def __init__(self, request_id: str, body_digest: bytes = b"", num_samples: int = 1) -> None:
        """Make a promise. num_samples: by which an answer that is not fetched counts."""
        self.request_id, self.body_digest, self.num_samples = request_id, body_digest, num_samples
        self.fetched_at: float | None = None  # of time.monotonic
        self._answer: Future[Answer] = Future()

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
        return self._answer.result() if self._answer.done() else None


class Promises:
    """The promises of all sessions, by request. Used on the event loop."""

    def __init__(self, most: int, kept_s: float) -> None:
        """Take the limits: of samples that are not fetched, and of the time for which a fetched answer is kept."""
        self._most, self._kept_s = most, kept_s
        self._promises: dict[str, Promise] = {}
        self._num_open = 0  # samples of the promises that are not fetched

    def get(self, request_id: str) -> Promise | None:
        """Return a promise; None: it is not known, or forgotten."""
        return self._promises.get(request_id)

    def add(self, request_id: str, body_digest: bytes, num_samples: int = 1) -> Promise:
        """Add a promise. Raises TooMany where too many answers are waited for or not fetched."""
        if self._num_open + num_samples > self._most:
            raise TooMany(
                f"{self._num_open} samples are open, and {num_samples} more are asked for (--limit max_open_samples=N)"
            )
        self._num_open += num_samples
        promise = self._promises[request_id] = Promise(request_id, body_digest, num_samples)
        return promise

    async def fetch(self, promise: Promise, timeout_s: float) -> Answer | None:
        """Return the answer of a promise, which is forgotten a while later; None: it did not come in time."""
        answer = await promise.wait(timeout_s)
        if answer is not None:
            if promise.fetched_at is None and self._promises.get(promise.request_id) is promise:
                self._num_open -= promise.num_samples
            promise.fetched_at = time.monotonic()
        return answer

    def forget_fetched(self) -> None:
        """Forget the answers that were fetched long enough ago."""
        before = time.monotonic() - self._kept_s
        self._forget(one for one in self._promises.values() if one.fetched_at is not None and one.fetched_at < before)

    def forget(self, prefix: str) -> None:
        """Forget the promises whose ids begin so."""
        self._forget(one for one in self._promises.values() if one.request_id.startswith(prefix))

    def _forget(self, promises: Iterable[Promise]) -> None:
        for one in list(promises):
            del self._promises[one.request_id]
            if one.fetched_at is None:
                self._num_open -= one.num_samples
