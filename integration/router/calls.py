"""A request to a worker, and the headers that are forwarded with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Headers of one connection, headers that the router writes itself, and headers that would compress an event stream.
_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te",
     "trailer", "transfer-encoding", "upgrade", "content-length", "accept-encoding", "expect"}
)  # fmt: skip
NOT_RETURNED = _NOT_FORWARDED | {"date", "server"}


@dataclass(frozen=True)
class WorkerCall:
    """A request to a worker."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]  # without the headers of the connection
    body: bytes

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path


def headers_of(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Select the headers of a client that are forwarded to a worker: Authorization, but not those of the connection."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]
    return (*kept, ("accept-encoding", "identity"))
