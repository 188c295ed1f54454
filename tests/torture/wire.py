"""Requests over plain sockets, a record of the last ones, and the list of violations that all threads write."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PATIENCE_S = 60.0  # longest wait of an attacker for an answer
STATE_PATIENCE_S = 5.0
_KEPT_REQUESTS = 2000
_KEPT_BYTES = 4096  # of each kept request; a longer one is made again with --replay
_KEPT_ANSWER = 8 << 20
_MAX_LISTED = 10


@dataclass(frozen=True)
class Address:
    """A server: where it listens, and its keys ("" for none)."""

    url: str
    api_key: str = ""
    admin_key: str = ""

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


@dataclass
class Sent:
    """One request of an attacker, for the report and for a replay. Times are of time.monotonic()."""

    attacker: str
    step: int
    name: str
    began: float
    num_bytes: int
    data: str  # base64 of the first bytes
    ended: float | None = None
    status: int | str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a request; status 0 where there was none, with the reason in `body`."""

    status: int
    body: bytes

    def json(self) -> object:
        """Return the value of a JSON body; None for another body."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Record:
    """The last requests of all attackers. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[Sent] = deque(maxlen=_KEPT_REQUESTS)
        self.statuses: Counter[str] = Counter()

    def open(self, attacker: str, step: int, name: str, data: bytes) -> Sent:
        sent = Sent(attacker, step, name, time.monotonic(), len(data), base64.b64encode(data[:_KEPT_BYTES]).decode())
        with self._lock:
            self._last.append(sent)
        return sent

    def close(self, sent: Sent, status: int | str) -> None:
        with self._lock:
            sent.ended, sent.status = time.monotonic(), status
            self.statuses[f"{sent.attacker} {status}"] += 1

    def between(self, began: float, ended: float) -> list[str]:
        """List the requests that were under way in this time, each as `attacker:step name`."""
        with self._lock:
            found = [s for s in self._last if s.began <= ended and (s.ended is None or s.ended >= began)]
        return [f"{s.attacker}:{s.step} {s.name} ({s.num_bytes} bytes)" for s in found]

    def save(self, path: Path) -> None:
        """Write the kept requests as JSON lines, the oldest first."""
        with self._lock:
            lines = [json.dumps(asdict(sent)) for sent in self._last]
        path.write_text("".join(line + "\n" for line in lines))


@dataclass(frozen=True)
class Violation:
    """A broken requirement, and the steps of attackers that were under way."""

    kind: str  # crash, late, stalled, unhealthy, no_answer, server_error, altered, lost, unusable, memory, ...
    what: str
    at_s: float  # since the beginning of the storm
    under_way: tuple[str, ...] = ()  # `attacker:step name`, for --replay


@dataclass
class Verdict:
    """The violations so far; of each kind the first ones are kept whole and all are counted. Any thread may call."""

    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    listed: list[Violation] = field(default_factory=list)
    # Times in which a fault explains errors, and whether it explains late answers, too.
    excuses: list[tuple[float, float, bool]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, what: str, under_way: Iterable[str] = ()) -> None:
        found = Violation(kind, what[:2000], round(time.monotonic() - self.began, 1), tuple(under_way)[:40])
        with self._lock:
            self.counts[kind] += 1
            if self.counts[kind] <= _MAX_LISTED:
                self.listed.append(found)

    def excuse(self, began: float, ended: float, is_late: bool) -> None:
        """Note a time in which an injected fault explains a named server error and, if `is_late`, a late answer."""
        with self._lock:
            self.excuses.append((began, ended, is_late))

    def is_excused(self, began: float, ended: float, is_late: bool = False) -> bool:
        with self._lock:
            return any(
                start <= ended and end >= began and (explains or not is_late) for start, end, explains in self.excuses
            )


def request_bytes(
    method: str, path: str, body: bytes = b"", key: str = "", headers: Iterable[bytes] = (), *, close: bool = True
) -> bytes:
    """Build a request with a JSON body."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: 127.0.0.1", *headers]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    lines += [b"Connection: close"] * close
    if key:
        lines.append(b"Authorization: Bearer " + key.encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def exchange(address: Address, data: bytes, patience_s: float = PATIENCE_S, *, ends: bool = False) -> Answer:
    """Send bytes and read the answer until the server closes. ends: send nothing after them. Raises OSError."""
    deadline, parts, size = time.monotonic() + patience_s, [], 0
    with socket.create_connection(address.place, timeout=patience_s) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # the server answered without reading the whole body
        try:
            while part := connection.recv(1 << 16):
                size += len(part)
                if size <= _KEPT_ANSWER:
                    parts.append(part)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
        except ConnectionError:
            pass  # closed without reading the rest of the body
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        return Answer(0, head[:200])
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    return Answer(int(head[9:12]), body)


def _unchunked(body: bytes) -> bytes:
    parts = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            return b"".join(parts)
        parts.append(rest[:length])
        body = rest[length + 2 :]


class Wire:
    """The requests of one attacker: sent, recorded and judged."""

    def __init__(
        self, address: Address, record: Record, verdict: Verdict, attacker: str, is_over: Callable[[], bool]
    ) -> None:
        self.address, self.record, self.verdict = address, record, verdict
        self.attacker, self.step, self.is_over = attacker, 0, is_over
        self.pause = threading.Event()

    def call(
        self, method: str, path: str, body: object = None, *, admin: bool = False, name: str = "",
        patience_s: float = PATIENCE_S,
    ) -> Answer:  # fmt: skip
        """Send one request and judge its answer. body: bytes, or a value for JSON."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        key = self.address.admin_key if admin else self.address.api_key
        return self.send(name or f"{method} {path}", request_bytes(method, path, raw, key), patience_s=patience_s)

    def send(self, name: str, data: bytes, *, patience_s: float = PATIENCE_S, ends: bool = False) -> Answer:
        """Send bytes and judge the answer. ends: they may be no whole request, so that no answer is one as well."""
        sent = self.record.open(self.attacker, self.step, name, data)
        try:
            answer = exchange(self.address, data, patience_s, ends=ends)
        except OSError as error:
            answer = Answer(0, repr(error).encode())
            self.pause.wait(0.2 if isinstance(error, ConnectionRefusedError) else 0)  # others report that it is gone
        self.record.close(sent, answer.status or "none")
        self._judge(sent, answer, ends)
        return answer

    def _judge(self, sent: Sent, answer: Answer, ends: bool) -> None:
        assert sent.ended is not None
        is_error = answer.status in (500, 502) or (answer.status == 0 and not ends)
        if not is_error or self.is_over() or self.verdict.is_excused(sent.began, sent.ended):
            return
        what, place = f"{sent.name} after {sent.ended - sent.began:.1f} s", f"{self.attacker}:{self.step}"
        if answer.status:
            self.verdict.add("server_error", f"{what}: {shown(answer)}", [place])
        else:
            self.tell("no_answer", what, answer, [place])

    def tell(self, kind: str, what: str, answer: Answer, under_way: Iterable[str]) -> None:
        """Note a violation with the answer's text and the server's `/state`, which say why it came to this."""
        data = request_bytes("GET", "/state", key=self.address.api_key)
        try:
            state = shown(exchange(self.address, data, STATE_PATIENCE_S))
        except OSError as error:
            state = repr(error)
        self.verdict.add(kind, f"{what}: {shown(answer)}; /state: {state}", under_way)


def shown(answer: Answer) -> str:
    """Return an answer's status and the beginning of its text."""
    return f"{answer.status} {answer.body[:800].decode(errors='replace')}"
