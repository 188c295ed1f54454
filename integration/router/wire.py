"""Calls to workers over HTTP. Answers are bounded and taken as bytes, and errors are in words that a caller knows.

The transport is used without httpx's client: a client would keep cookies of the workers, decompress their answers, and
follow what their headers say.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ..http.edge.errors import HttpError
from .calls import WorkerCall

_MAX_WORDS = 200  # characters of an error of the transport
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}
_NO_WAY = {errno.ENETUNREACH, errno.EADDRNOTAVAIL}  # of an address of a family that this machine does not have
# An idle connection is used no more after so long: well before a worker closes it (idle_timeout_s, 5 s), which would
# cut a call off that is just sent.
KEPT_S = 2.0


class WorkerFailed(Exception):
    """The worker gave no answer that can be used. The message is sent to clients."""


class NotReached(WorkerFailed):
    """No connection to the worker was made, so it has nothing of the call."""


class NobodyListens(NotReached):
    """The worker's machine refused the connection, so no process listens at its address."""


class NoDescriptors(NotReached):
    """This process, or its machine, has no file descriptor left for a connection: nothing is known of the worker."""

    retry_after_s = 1.0


@dataclass(frozen=True)
class Answer:
    """A complete answer of a worker."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    def object(self) -> dict[str, object]:
        """Return the JSON object of the body, or {} where it is none."""
        try:
            values = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}


def words_of(refusal: object) -> set[str]:
    """Return the words by which the JSON of a refusal names its reason, as `overloaded`."""
    told = refusal if isinstance(refusal, dict) else {}
    error = told.get("error")
    words = [told.get("status"), told.get("code")]
    words += [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return {word for word in words if isinstance(word, str)}


class _Body(httpx.AsyncByteStream):
    """The body of an answer, after which its connection takes no further call if the worker has sent bytes behind it.
    httpcore would read the next answer from them, which it has no public means to prevent."""

    def __init__(self, body: Any) -> None:
        self._body, self._state = body, body._httpcore_stream._stream._connection._h11_state

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        # httpx calls this once, and before it the connection is this answer's alone.
        if self._state.trailing_data[0]:
            self._state.send_failed()  # httpcore then closes the connection
        await self._body.aclose()


class Wire:
    """The connections to the workers."""

    def __init__(self, verify: ssl.SSLContext, connect_timeout_s: float, num_kept: int) -> None:
        """Prepare connections. num_kept: idle connections that stay open; 0: a new connection for each call."""
        limits = httpx.Limits(max_keepalive_connections=num_kept, keepalive_expiry=KEPT_S)
        self._transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)
        self._connect_timeout_s = connect_timeout_s

    @asynccontextmanager
    async def call(self, url: str, call: WorkerCall) -> AsyncIterator[httpx.Response]:
        """Send a call to the worker at `url`, and yield its answer when the head is there; the body is read inside the
        block. Raises WorkerFailed, also for errors inside the block, and HttpError 400 for a call that cannot be
        forwarded."""
        extensions = {
            "timeout": {"connect": self._connect_timeout_s},
            "target": call.target.encode("latin-1"),  # as the client wrote it
        }
        request = httpx.Request(
            call.method, url, headers=list(call.headers), content=call.body, extensions=extensions
        )  # fmt: skip
        try:
            answer = await self._transport.handle_async_request(request)
            answer.stream = _Body(answer.stream)
            try:
                if not 200 <= answer.status_code < 600:
                    raise WorkerFailed(f"it answered with the status {answer.status_code}, which ends no request")
                yield answer
            finally:
                await answer.aclose()
        except httpx.ConnectTimeout:
            raise NotReached(f"no connection within {self._connect_timeout_s:g} s") from None
        except httpx.ConnectError as error:
            numbers = _numbers_of(error)
            if numbers & _NO_DESCRIPTOR:
                raise NoDescriptors("the router has no file descriptor left for a connection to it") from error
            # Each address to which there is a way has refused the connection.
            is_refused = errno.ECONNREFUSED in numbers and numbers <= {errno.ECONNREFUSED, *_NO_WAY}
            raise (NobodyListens if is_refused else NotReached)(_with_words("no connection", error)) from error
        except httpx.LocalProtocolError as error:  # the worker has not seen it
            raise HttpError(400, _with_words("the request cannot be forwarded", error)) from None
        except httpx.RemoteProtocolError as error:
            raise WorkerFailed(_with_words("its answer to the call is broken", error)) from error
        except httpx.TransportError as error:
            raise WorkerFailed(_with_words("the connection broke", error)) from error

    async def fetch(self, url: str, call: WorkerCall, max_bytes: int, limit_s: float) -> Answer:
        """Send a call and return its whole answer. Raises WorkerFailed, also for an answer of more than `max_bytes` and
        for one that takes more than `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s), self.call(url, call) as answer:
                return Answer(answer.status_code, await beginning(answer, max_bytes, is_all=True))
        except TimeoutError:
            raise WorkerFailed(f"timed out: no answer within {limit_s:g} s") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


async def beginning(answer: httpx.Response, max_bytes: int, is_all: bool = False) -> bytes:
    """Read at most `max_bytes` of an answer. Raises WorkerFailed for a longer one if it must be all of it."""
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > max_bytes:
            if is_all:
                raise WorkerFailed(f"its answer is longer than {max_bytes} bytes")
            break
    return bytes(body[:max_bytes])


def _numbers_of(error: BaseException) -> set[int | None]:
    """Return the system's error numbers for which no address of a worker was reached; None: a reason without one."""
    reasons: list[BaseException] = []
    open_ones: list[BaseException] = [error]
    while open_ones:
        one = open_ones.pop()
        if isinstance(one, BaseExceptionGroup):
            open_ones += one.exceptions
        elif (deeper := one.__cause__ or one.__context__) is not None:
            open_ones.append(deeper)
        else:
            reasons.append(one)
    return {one.errno if isinstance(one, OSError) else None for one in reasons}


def _with_words(what: str, error: httpx.TransportError) -> str:
    """Add the transport's words to `what`, without names of Python's types."""
    words = re.sub(r"bytearray\((.*)\)", r"\1", " ".join(str(error).split()))[:_MAX_WORDS]
    return f"{what}: {words}" if words else what
