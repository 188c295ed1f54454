"""Workers of a router that are no engines: they answer what a test tells them, and fail on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.changes.rules import ELSEWHERE
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import route_in_background

WAIT_S = 20.0
GENERATION = ("/generate", "/inference/v1/generate", "/tokenize", "/detokenize")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Check repeatedly until it holds. Every check is a call over the network, so this is no busy loop."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore the error: tests end connections on purpose, and a client detects a wrong answer."""


class SlowAnswer:
    """An answer of a FakeWorker to a verb that waits until the test releases it."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, body: dict) -> tuple[int, object]:
        self.entered.set()
        self.leave.wait(WAIT_S)
        return 200, {"success": True}


class FakeWorker:
    """A server that answers from a table of path: (status, object) or function(body) -> either, and notes each call."""

    def __init__(self, version: str = "1", **info: object) -> None:
        self.version, self.info = version, {"startup_time": time.time(), **info}
        self.answers: dict[str, object] = {}
        self.calls: list[tuple[str, str, dict, dict]] = []  # method, path, headers, body
        self.generate: Callable[[Handler, dict], None] = lambda handler, body: handler.reply(200, {"text": self.url})
        self.is_paused = self.is_draining = self.is_loading = False
        self.start()

    def start(self, port: int = 0) -> None:
        """Listen, at the port that it had where one is given: then it is another process."""
        if port:
            self.info = {**self.info, "startup_time": time.time()}
        worker = self

        class Bound(Handler):
            fake = worker

        self.server = _Server(("127.0.0.1", port), Bound)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[dict]:
        """Return the bodies of the calls to a path."""
        return [body for _, called, _, body in self.calls if called.partition("?")[0] == path]

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        if path == "/health":
            return (503 if self.is_loading else 200), None
        if path == "/ready" and self.is_draining:
            return 503, {"status": "draining"}
        if path == "/ready":
            return (503 if self.is_paused else 200), None
        if path in ("/get_weight_version", "/model_info"):
            named = {"weight_digest": self.info["weight_digest"]} if "weight_digest" in self.info else {}
            return 200, {"weight_version": self.version, "model_path": "m", **named}
        if path == "/server_info":
            return 200, self.info
        answer = self.answers.get(path, (200, {"success": True}))
        return answer(body) if callable(answer) else answer  # type: ignore[return-value]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeWorker

    def handle_one(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw.strip() else {}
        path = self.path.partition("?")[0]
        self.fake.calls.append((self.command, self.path, dict(self.headers), body))
        if path in GENERATION or (path.startswith(("/v1/", "/sessions/")) and path not in ELSEWHERE):
            self.fake.generate(self, body)
        else:
            self.reply(*self.fake.answer(path, body))

    do_GET = do_POST = do_PUT = handle_one

    def reply(self, status: int, value: object) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def send_part(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def die(self) -> None:
        """End like a killed process: the connections are reset."""
        self.close_connection = True
        with suppress(OSError):  # the router has already closed it
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


class Fleet:
    """A router over fake workers, and a client."""

    def __init__(self, folder: Path, workers: list[FakeWorker], wait: bool = True, **settings: object) -> None:
        self.workers = workers
        http = settings.pop("http", None) or HttpConfig(port=0)
        settings = {"health_interval_s": 0.05, "health_timeout_s": 2.0, "admin_timeout_s": 10.0} | settings
        self.journal = folder / "journal.json"
        config = RouterConfig(tuple(w.url for w in workers), http, journal=self.journal, **settings)
        self.router = route_in_background(config)
        key = http.admin_api_key or http.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.router.url, timeout=WAIT_S, headers=headers, verify=False)
        if wait:
            wait_until(lambda: self.stats()["num_healthy"] == len(workers), "all workers alive")

    def stats(self) -> dict:
        return self.http.get("/workers").json()["stats"]

    def report(self, worker: FakeWorker) -> dict:
        return next(entry for entry in self.http.get("/workers").json()["workers"] if entry["url"] == worker.url)

    def post(self, path: str, body: dict | None = None) -> httpx.Response:
        return self.http.post(path, json=body or {})

    def close(self) -> None:
        self.http.close()
        self.router.close()
        for worker in self.workers:
            worker.stop()


def dies(handler: Handler, body: dict) -> None:
    handler.die()


def refuse(message: str, kind: str = "ValueError") -> tuple[int, object]:
    return 400, {"success": False, "message": message, "error": {"message": message, "type": kind}}


def counted(fleet: Fleet) -> dict[tuple[str, ...], float]:
    """Read the samples of /metrics, by name and the values of the labels in the order of their names."""
    answer = httpx.get(f"{fleet.router.url}/metrics", timeout=WAIT_S)  # without a key
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {(sample.name.removeprefix("lockstep:router_"), *sample.labels.values()): sample.value for sample in samples}


def settled(fleet: Fleet) -> dict[tuple[str, ...], float]:
    """Return `counted` as soon as no worker has a request: a client has its answer a moment before it is counted."""
    wait_until(lambda: not any(value for name, value in counted(fleet).items() if name[0] == "load"), "no load")
    return counted(fleet)
