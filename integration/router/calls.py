"""A request on its way to a worker, and the headers that travel with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Those of one connection, those that we write anew, and those that would pack an event stream.
_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te",
     "trailer", "transfer-encoding", "upgrade", "content-length", "accept-encoding", "expect"}
)  # fmt: skip
NOT_RETURNED = _NOT_FORWARDED | {"date", "server"}


@dataclass(frozen=True)
class WorkerCall:
    """A request as it goes to a worker."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]  # without those of the connection
    body: bytes

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


def headers_of(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """A client's headers that go on to a worker: Authorization does, what belongs to the connection does not."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]
    return (*kept, ("accept-encoding", "identity"))
