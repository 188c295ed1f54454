"""Workers of a router that pass a real server's answers on and die in the middle of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx

from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, Handler


class CutWorker(FakeWorker):
    """A worker that relays a real server's generation, and dies after so many events of each stream."""

    def __init__(self, url: str, cuts: Callable[[], int | None]) -> None:
        """Relay the server at `url`. cuts: called for each stream; None: it comes to its end."""
        self.real, self.cuts = url, cuts
        info = httpx.get(f"{url}/server_info", timeout=WAIT_S).json()
        super().__init__(info["weight_version"])
        self.info = {**self.info, "weight_digest": info["weight_digest"], "guarantee": info["guarantee"]}
        self.generate = self._relay

    def _relay(self, handler: Handler, body: dict) -> None:
        path = handler.path.partition("?")[0]
        num_left = self.cuts() if body.get("stream") else None
        with httpx.stream("POST", f"{self.real}{path}", json=body, timeout=WAIT_S) as answer:
            if not answer.headers["content-type"].startswith("text/event-stream"):
                handler.reply(answer.status_code, json.loads(answer.read()))
                return
            handler.begin_stream()
            rest, parts = b"", answer.iter_raw()
            for part in parts:
                rest += part
                while (end := rest.find(b"\n\n") + 2) >= 2:
                    if num_left == 0:
                        handler.close_connection = True  # no reset, which would drop what is sent already
                        self._forget(body, parts)
                        return
                    handler.send_part(rest[:end])
                    rest, num_left = rest[end:], None if num_left is None else num_left - 1
            handler.send_part(b"")

    def _forget(self, body: dict, parts: Iterator[bytes]) -> None:
        """End the request at the real server, which all workers share: there its rid is taken until it has ended."""
        if rid := body.get("rid"):
            httpx.post(f"{self.real}/abort_request", json={"rid": rid}, timeout=WAIT_S).raise_for_status()
            for _ in parts:
                pass
