"""Streams from several servers, of which some report no progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.router.moving.streaming import stream_from
from lockstep.weight_sync.target import TargetError

BODY = {"text": "1+1=", "stream": True}
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return f'data: {{"text": "{text}"}}\n\n'.encode()


@contextmanager
def server(events: list[bytes], *, breaks: bool) -> Iterator[HttpTarget]:
    """Serve these events, as a server without notes does, and break off or end the body behind them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for one in events:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(one), one))
            if not breaks:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def do_GET(self) -> None:
            self.send_error(404)

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        with closing(HttpTarget(f"http://127.0.0.1:{made.server_port}")) as target:
            yield target
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_what_the_caller_has_is_not_repeated_by_a_server_that_begins_anew():
    with server([event("one")], breaks=True) as a, server([event("ONE"), DONE], breaks=False) as b:
        events = stream_from([a, b], "/generate", BODY, timeout_s=10)
        assert next(events) == event("one")
        with pytest.raises(TargetError, match=b.name):
            next(events)


def test_a_server_that_gave_nothing_is_followed_by_one_that_begins():
    with server([], breaks=True) as a, server([event("ONE"), DONE], breaks=False) as b:
        assert list(stream_from([a, b], "/generate", BODY, timeout_s=10)) == [event("ONE"), DONE]


def test_a_stream_that_ends_early_is_named():
    with (
        server([event("one")], breaks=False) as a,
        pytest.raises(TargetError, match=r"its stream ended before \[DONE\]"),
    ):
        list(stream_from([a], "/generate", BODY, timeout_s=10))
