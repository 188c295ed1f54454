"""The bytes of a client as HTTP/1.1, with limits of what costs much more time than its bytes cost their sender."""

from __future__ import annotations

import re
from http import HTTPStatus

import h11

_MIN_CHUNK_BYTES = 16  # of a body's chunks on average, after the first ones
_NUM_FREE_CHUNKS = 1000
_CHUNKS_A_TURN = 64  # of a body, that are read before the event loop serves others
_ABSOLUTE = re.compile(rb"(?i:https?)://(?:[^/?#]*@)?([^/?#@]+)([^#]*)")  # a target with host and path
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_NUM_OTHER_LINES = 2  # of a head: its first line, and the empty one after it


class Reader(h11.Connection):
    """A server's side of a connection. A target in absolute form (`GET http://host/path`) is read as its path, with
    that host, as RFC 9112 has it (3.2.2). `next_event` raises RemoteProtocolError also for a head with too many
    headers, for a body with two lengths and for one in tiny chunks; `refusal` is then the answer."""

    def __init__(self, max_head_bytes: int, max_headers: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes, self._max_headers = max_head_bytes, max_headers
        self._num_chunks = self._num_bytes = 0  # of the body that arrives
        self._num_left = _CHUNKS_A_TURN
        self._error: h11.RemoteProtocolError | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether `next_event` has returned NEED_DATA because the turn is over: call it again after `begin_turn`."""
        return self._num_left < 0

    def begin_turn(self) -> None:
        """Allow `next_event` to read further chunks of a body."""
        self._num_left = _CHUNKS_A_TURN

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event as `h11.Connection` does. Raises RemoteProtocolError."""
        try:
            if self.their_state is h11.IDLE:
                self._check_head()
            if self._num_left <= 0:
                self._num_left = -1
                return h11.NEED_DATA
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_one_length(event)
                event = _in_origin_form(event)
                self._num_chunks = self._num_bytes = 0
            elif isinstance(event, h11.Data):
                self._count(event)
        except h11.RemoteProtocolError as error:
            self._error = error
            raise
        return event

    def refusal(self) -> bytes:
        """Return the answer to the request that `next_event` has refused, with the reason."""
        hint = self._error.error_status_hint if self._error is not None else HTTPStatus.BAD_REQUEST
        # Another transfer encoding is 501 by the book; the mistake is the caller's, as all that has no place here.
        status = HTTPStatus(hint if hint < HTTPStatus.INTERNAL_SERVER_ERROR else HTTPStatus.BAD_REQUEST)
        text = f"Invalid HTTP request received: {self._error}"
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            text = (
                f"the head is longer than {self._max_head_bytes} bytes (max_head_bytes), or has more than "
                f"{self._max_headers} headers (max_headers)"
            )
        body = text.encode("ascii", "backslashreplace")[:1000]
        return (
            b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, status.phrase.encode(), len(body), body)
        )

    def _check_head(self) -> None:
        """Count the lines of a head before they are parsed, which takes long for thousands."""
        data, _ = self.trailing_data
        found = _END_OF_HEAD.search(data)
        end = found.end() if found else len(data)
        if end > self._max_head_bytes or data.count(b"\n", 0, end) > self._max_headers + _NUM_OTHER_LINES:
            raise h11.RemoteProtocolError("too long a head", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_left -= data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > _NUM_FREE_CHUNKS and self._num_bytes < _MIN_CHUNK_BYTES * self._num_chunks:
            raise h11.RemoteProtocolError(
                f"{self._num_chunks} chunks of a body have fewer than {_MIN_CHUNK_BYTES} bytes on average"
            )


def _in_origin_form(request: h11.Request) -> h11.Request:
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    host, path = found.groups()
    target = path if path.startswith(b"/") else b"/" + path
    headers = [(name, host if name == b"host" else value) for name, value in request.headers]
    return h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version)


def _check_one_length(request: h11.Request) -> None:
    """Refuse a body with two lengths: a proxy that reads the other one takes part of it for the next request."""
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise h11.RemoteProtocolError("a body has either Content-Length or Transfer-Encoding, not both")
