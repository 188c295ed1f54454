"""A request to a worker, and the headers that are forwarded with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

from ..http.edge.session_paths import path_of

Headers = tuple[tuple[bytes, bytes], ...]

# Headers of one connection, headers that the router writes itself, and headers that would compress an event stream.
_NOT_FORWARDED = frozenset(
    {b"host", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"accept-encoding", b"expect"}
)  # fmt: skip
_NOT_RETURNED = _NOT_FORWARDED | {b"date", b"server"}
ROUTER_HEADER = b"x-lockstep-router"  # of each call to a worker: the names of the routers through which it has come
PLAIN = (b"accept-encoding", b"identity")


@dataclass(frozen=True)
class WorkerCall:
    """A request to a worker."""

    method: str
    path: str
    query: str
    headers: Headers  # without the headers of the connection
    body: bytes
    session: str | None = None  # that the client's path named before this one

    @property
    def target(self) -> str:
        """Path and query."""
        path = self.path if self.session is None else path_of(self.session, self.path)
        return f"{path}?{self.query}" if self.query else path


def headers_of(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Select the headers of a client that are forwarded to a worker: Authorization, but not those of the connection."""
    return (*((name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED), PLAIN)


def returned(headers: Iterable[tuple[bytes, bytes]], url: str) -> list[tuple[bytes, bytes]]:
    """Select the headers of the worker at `url` that are passed on to a client, as they came. Only a redirect to the
    worker itself becomes a path, which leads the client to the router."""
    kept = [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_RETURNED]
    return [(name, _without_address(value, url) if name == b"location" else value) for name, value in kept]


def _without_address(location: bytes, url: str) -> bytes:
    """Return a URL at the address of `url` as a path, any other one as it is."""
    try:
        parts = urlsplit(location.decode("latin-1"))
        if not _is_at(parts, urlsplit(url)):
            return location
    except ValueError:
        return location
    path = "/" + parts.path.lstrip("/")  # two slashes would begin an address
    return urlunsplit(("", "", path, parts.query, parts.fragment)).encode("latin-1")


def _is_at(location: SplitResult, worker: SplitResult) -> bool:
    """Return whether a URL is the worker's own. A worker behind something that ends its TLS does not know of it: it
    writes http:// and the port of the request, of which there is none where it is that of https."""
    if location.scheme == "http" and worker.scheme == "https" and location.port is None:
        location = location._replace(scheme="https")
    return location.hostname == worker.hostname and _port_of(location) == _port_of(worker)


def _port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
