"""A request to a worker, and the headers that are forwarded with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Headers = tuple[tuple[bytes, bytes], ...]

# Headers of one connection, headers that the router writes itself, and headers that would compress an event stream.
_NOT_FORWARDED = frozenset(
    {b"host", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"accept-encoding", b"expect"}
)  # fmt: skip
_NOT_RETURNED = _NOT_FORWARDED | {b"date", b"server"}
PLAIN = (b"accept-encoding", b"identity")


@dataclass(frozen=True)
class WorkerCall:
    """A request to a worker."""

    method: str
    path: str
    query: str
    headers: Headers  # without the headers of the connection
    body: bytes

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path


def headers_of(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Select the headers of a client that are forwarded to a worker: Authorization, but not those of the connection."""
    return (*((name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED), PLAIN)


def returned(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Select the headers of a worker that are passed on to a client, as they came."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_RETURNED]
