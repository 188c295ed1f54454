"""Workers that answer garbage: a client gets 502 with the worker's address, or another worker's answer, in bounded
memory."""

from __future__ import annotations

import gzip
import json
import re
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.changes.journal import UpdateJournal
from lockstep.tests.support.callers import submit
from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, Handler, SlowAnswer, refuse, wait_until

pytestmark = pytest.mark.slow  # many small calls over real sockets

CLASS_NAME = re.compile(r"\b[A-Z]\w*(Error|Timeout|Exception)\b|httpx|httpcore|bytearray")
MIB = 1 << 20


def raw(*parts: bytes, closes: bool = True) -> Callable[[Handler, dict], None]:
    """Make a worker's handler that sends these bytes and closes the connection, or keeps it for further requests."""

    def send(handler: Handler, body: dict) -> None:
        with suppress(OSError):  # the router may close first
            for part in parts:
                handler.wfile.write(part)
        handler.close_connection = closes

    return send


def endless(head: bytes, unit: bytes) -> Callable[[Handler, dict], None]:
    """Make a worker's handler that sends the head, and then the unit until the router has had enough."""

    def send(handler: Handler, body: dict) -> None:
        with suppress(OSError):
            handler.wfile.write(head)
            while True:
                handler.wfile.write(unit)

    return send


GARBAGE = {
    "no HTTP": raw(b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n"),
    "a broken status line": raw(b"HTTP/1.1 OK\r\n\r\n"),
    "no status": raw(b"HTTP/1.1\r\n\r\n"),
    "status 42": raw(b"HTTP/1.1 042 Odd\r\ncontent-length: 0\r\n\r\n"),
    "status 101": raw(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"),
    "status 999": raw(b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n"),
    "a broken header": raw(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"),
    "a header with a zero byte": raw(b"HTTP/1.1 200 OK\r\nx-a: \0\r\ncontent-length: 0\r\n\r\n"),
    "a huge head": raw(b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 300_000 + b"\r\ncontent-length: 0\r\n\r\n"),
    "an endless head": endless(b"HTTP/1.1 200 OK\r\n", b"x-a: aaaaaaaaaaaaaaa\r\n" * 1000),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x"),
    "a length that is none": raw(b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}"),
    "a body that is too short": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{}"),
    "a broken chunk": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "an unknown coding": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: zip\r\n\r\n{}"),
    "nothing": raw(),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_of_a_worker_is_a_502_that_names_it_and_of_one_worker_it_is_another_ones_answer(make_fleet, what):
    fleet = make_fleet(2, max_attempts=2)
    bad, good = fleet.workers
    bad.generate = GARBAGE[what]
    for i in range(4):
        answer = fleet.post("/generate", {"text": f"{i}"})
        assert (answer.status_code, answer.json()) == (200, {"text": good.url})
    assert bad.asked("/generate")
    fleet.post("/remove_worker?url=" + good.url)
    answer = fleet.post("/generate", {"text": "a"})
    assert answer.status_code == 502 and bad.url in answer.json()["message"], answer.text
    assert not CLASS_NAME.search(answer.text), answer.text


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nx-name: \xe2\x82\xac\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.0 200\r\n\r\nuntil the end", b"until the end"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 6\r\n\r\n{\xff\xfe\0{{",
            b"{\xff\xfe\0{{",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 500 Poison\r\n\r\n", b"{}"),
    ],
)
def test_an_answer_that_is_odd_and_clear_goes_through_as_it_came(fleet, sent, expected):
    for worker in fleet.workers:
        worker.generate = raw(sent)
    for _ in range(3):
        answer = fleet.post("/generate", {"text": "a"})
        assert (answer.status_code, answer.content) == (200, expected)
        if b"x-name" in sent:
            assert dict(answer.headers.raw)[b"x-name"] == b"\xe2\x82\xac"


@pytest.mark.parametrize(
    "answer", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_what_a_worker_says_behind_an_answer_is_not_the_next_ones(fleet, answer):
    for worker in fleet.workers:
        worker.generate = raw(b"HTTP/1.1 200 OK\r\n" + answer + b"HTTP/1.1 500 Poison\r\n\r\n", closes=False)
    for _ in range(6):
        answer = fleet.post("/generate", {"text": "a"})
        assert (answer.status_code, answer.content) == (200, b"{}")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: fleet.post("/generate", {"text": "a"}), range(64)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(200, b"{}")}


def test_a_clients_odd_headers_and_path_reach_the_worker(fleet):
    headers = [(b"X-Name", b"M\xfcller"), (b"content-type", b"application/json")]
    answer = fleet.http.post("/v1/caf%C3%A9%zz?q=%zz", content=b"{}", headers=headers)
    assert answer.status_code == 200
    [worker] = [worker for worker in fleet.workers if worker.url == answer.json()["text"]]
    _, path, seen, _ = next(call for call in worker.calls if call[1].startswith("/v1/"))
    assert path.endswith("?q=%zz") and seen["x-name"] == "M\xfcller"


def test_a_workers_cookies_stay_with_the_client_that_got_them(fleet):
    for worker in fleet.workers:
        worker.generate = raw(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 2\r\n\r\n{}")
    with httpx.Client(base_url=fleet.router.url, timeout=WAIT_S) as client:
        assert client.post("/generate", json={}).headers["set-cookie"] == "a=b"
    fleet.post("/generate")  # the first call of this client
    calls = [headers for worker in fleet.workers for _, _, headers, _ in worker.calls]
    assert calls and not any(name.lower() == "cookie" for headers in calls for name in headers)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("application/json", b"a" * MIB), ("text/event-stream", b"a" * MIB), ("text/event-stream", b"data: 1\n\n" * 99)],
)
def test_an_answer_without_end_is_passed_on_in_bounded_memory_until_the_client_leaves(make_fleet, kind, unit):
    fleet = make_fleet(1, max_kept_answer_bytes=MIB)
    [worker] = fleet.workers
    worker.generate = endless(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind.encode() + b"\r\n\r\n", unit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_bytes = 0
    with fleet.http.stream("POST", "/generate", json={"text": "a"}) as answer:
        for part in answer.iter_raw():
            num_bytes += len(part)
            if num_bytes > 100 * MIB:
                break
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * 1024  # KiB
    wait_until(lambda: not fleet.report(worker)["load"], "the worker's connection is closed")


def test_a_long_answer_that_breaks_off_is_seen_to_be_incomplete(make_fleet):
    fleet = make_fleet(2, max_kept_answer_bytes=1000)
    length = b"content-length: 9000\r\n\r\n"
    for head in (length, b"transfer-encoding: chunked\r\n\r\n7d0\r\n"):
        for worker in fleet.workers:
            worker.generate = raw(b"HTTP/1.1 200 OK\r\n" + head + b"a" * 2000)
        with pytest.raises(httpx.RemoteProtocolError):
            fleet.post("/generate", {"text": "a"})
    assert sum(len(worker.asked("/generate")) for worker in fleet.workers) == 2  # nothing is asked twice
    for worker in fleet.workers:
        worker.generate = raw(b"HTTP/1.1 200 OK\r\n" + length + b"a" * 9000)
    answer = fleet.post("/generate", {"text": "a"})
    assert len(answer.content) == 9000 and answer.headers["content-length"] == "9000"


# -- administration and probes ---------------------------------------------------------------------------------------


def answering(worker: FakeWorker, path: str, data: bytes, *headers: str) -> None:
    """Let the worker answer a path of administration or of probes with these bytes."""
    usual = worker.server.RequestHandlerClass.handle_one
    lines = "".join(f"{header}\r\n" for header in headers)

    def handle(handler: Handler) -> None:
        if handler.path.partition("?")[0] != path:
            usual(handler)
            return
        handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with suppress(OSError):
            handler.wfile.write(f"HTTP/1.1 200 OK\r\n{lines}content-length: {len(data)}\r\n\r\n".encode() + data)

    kind = worker.server.RequestHandlerClass
    kind.do_GET = kind.do_POST = kind.handle_one = handle


@pytest.mark.parametrize(
    "data",
    [
        b"no JSON", b"[1, 2", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b"\xff\xfe", b"[" * 50_000,
        b'{"a":' * 900 + b"1" + b"}" * 900, b"9" * 5000,
    ],
)  # fmt: skip
def test_a_verbs_answer_that_is_no_json_is_shown_as_text_and_is_no_fault_of_the_client(fleet, data):
    for worker in fleet.workers:
        for path in ("/state", "/v1/loads"):
            answering(worker, path, data)
    answer = fleet.http.get("/state")
    assert answer.status_code == 200 and {one["worker"] for one in answer.json()["results"]} == {
        worker.url for worker in fleet.workers
    }
    answer = fleet.http.get("/v1/loads")
    assert answer.status_code == 502 and all(worker.url in answer.text for worker in fleet.workers)


def test_a_verbs_answer_that_is_too_long_or_compressed_takes_no_memory(make_fleet):
    fleet = make_fleet(2, max_admin_answer_bytes=10_000)
    long, other = fleet.workers
    answering(long, "/state", json.dumps({"a": "a" * 20_000}).encode())
    answer = fleet.http.get("/state")
    assert answer.status_code == 502
    assert f"{long.url}: /state: its answer is longer than 10000 bytes" in answer.json()["message"]
    bomb = gzip.compress(b" " * 9 * MIB)
    answering(long, "/state", bomb[:9000], "content-encoding: gzip")
    assert len(fleet.http.get("/state").content) < MIB  # each byte of it may be written in six
    answering(other, "/state", b"[" * 20_000, "transfer-encoding: chunked")
    assert fleet.http.get("/state").status_code == 502


@pytest.mark.parametrize("data", [b"[]", b"no JSON", b'{"startup_time": [{}], "tp_size": 1e9, "weight_version": {}}'])
def test_a_worker_whose_reports_are_garbage_still_gets_requests_while_it_is_healthy(make_fleet, data):
    worker = FakeWorker()
    for path in ("/server_info", "/get_weight_version", "/model_info", "/ready"):
        answering(worker, path, data)
    fleet = make_fleet([worker])
    assert fleet.report(worker)["routable"] and fleet.post("/generate", {"text": "a"}).status_code == 200


def test_a_worker_whose_health_never_ends_is_not_healthy_and_errors_name_the_path(make_fleet):
    fleet = make_fleet(2, health_timeout_s=0.2, dead_after=2)
    bad, good = fleet.workers
    answering(bad, "/health", b"", "transfer-encoding: chunked")
    wait_until(lambda: fleet.report(bad)["status"] == "dead", "it is dead")
    told = fleet.report(bad)["last_error"]
    assert "GET /health" in told and not CLASS_NAME.search(told)
    bad.stop()
    wait_until(lambda: "no connection" in fleet.report(bad)["last_error"], "it is gone")
    assert not CLASS_NAME.search(fleet.report(bad)["last_error"])
    fleet.post("/remove_worker?url=" + good.url)
    answer = fleet.http.get("/state")
    assert answer.status_code == 503 and bad.url in answer.text and not CLASS_NAME.search(answer.text)


def test_the_journals_disk_does_not_hold_up_the_event_loop(fleet, monkeypatch):
    """A disk that takes its time while a failed update is written down: reports are answered meanwhile."""
    entered, leave = threading.Event(), threading.Event()
    write = UpdateJournal.save if hasattr(UpdateJournal, "save") else UpdateJournal.keep
    name = write.__name__

    def slow(journal: UpdateJournal, *given: str) -> None:
        entered.set()
        assert leave.wait(WAIT_S)
        write(journal, *given)

    monkeypatch.setattr(UpdateJournal, name, slow)
    fleet.workers[1].answers["/update_weights_from_disk"] = refuse("disk full")
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(fleet.post, "/update_weights_from_disk", {"model_path": "m"})
        assert entered.wait(WAIT_S)
        try:
            with httpx.Client(base_url=fleet.router.url, timeout=WAIT_S / 2) as client:
                assert client.get("/liveness").status_code == 200
            assert fleet.stats()["num_routable"] == 0  # before the disk has it
        finally:
            leave.set()
        assert updating.result(WAIT_S).status_code == 502
    assert json.loads(fleet.journal.read_text())["failure"]


def test_large_bodies_do_not_keep_reports_waiting(make_fleet):
    fleet = make_fleet(2, max_open_body_bytes=300 * MIB)
    for worker in fleet.workers:
        worker.server.RequestHandlerClass.handle_one = _swallow
        worker.server.RequestHandlerClass.do_POST = _swallow
    body = b'{"input_ids": [' + b"[1]," * (31 * MIB // 4) + b"[1]]}"
    num_reports = 0
    with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=fleet.router.url, timeout=3 * WAIT_S) as reports:
        sending = [pool.submit(fleet.http.post, "/generate", content=body, timeout=3 * WAIT_S) for _ in range(12)]
        while not all(one.done() for one in sending):
            assert reports.get("/workers").status_code == 200
            assert reports.get("/health").status_code == 200
            num_reports += 1
        statuses = {one.result(WAIT_S).status_code for one in sending}
    assert statuses <= {200, 503} and 200 in statuses
    assert num_reports > 2 * len(sending), "a report that waits for a body or two would be answered more rarely"
    answer = fleet.http.post("/generate", content=b" " * (33 * MIB))
    assert answer.status_code == 413 and "33554432 bytes" in answer.text


def _swallow(handler: Handler) -> None:
    left = int(handler.headers.get("content-length") or 0)
    while left:
        left -= len(handler.rfile.read(min(left, MIB)))
    handler.reply(200, {"text": handler.fake.url})


def test_bodies_beyond_the_memory_for_them_are_refused_and_the_memory_is_given_back(make_fleet):
    fleet = make_fleet(1, max_open_body_bytes=MIB)
    release = threading.Event()

    def waits(handler: Handler, body: dict) -> None:
        assert release.wait(WAIT_S)
        handler.reply(200, {})

    fleet.workers[0].generate = waits
    body = {"text": "a" * (MIB * 2 // 3)}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fleet.post, "/generate", body)
        wait_until(lambda: fleet.report(fleet.workers[0])["load"], "the first request is open")
        refused = fleet.post("/generate", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "overloaded"
        release.set()
        assert first.result(WAIT_S).status_code == 200
    assert fleet.post("/generate", body).status_code == 200


def test_bodies_of_reports_are_short_and_count_until_all_workers_have_answered(make_fleet):
    http, long = HttpConfig(port=0, max_control_body_bytes=1000), {"x": "a" * 900}
    fleet = make_fleet(2, http=http, max_open_body_bytes=1500)
    fleet.workers[0].answers["/is_paused"] = slow = SlowAnswer()
    first = submit(fleet.post, "/is_paused", long)
    assert slow.entered.wait(WAIT_S)
    refused = fleet.post("/is_sleeping", long)
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
    assert fleet.post("/abort_request", {"rid": "a" * 1100}).status_code == 200  # an admin call
    slow.leave.set()
    assert first.result(WAIT_S).status_code == 200
    assert fleet.post("/is_paused", long).status_code == 200
    assert fleet.post("/is_paused", {"x": "a" * 1100}).status_code == 413


def test_a_body_that_does_not_come_to_its_end_has_a_deadline(make_fleet):
    fleet = make_fleet(1, http=HttpConfig(port=0, body_timeout_s=0.2))
    port = int(fleet.router.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{")
        assert connection.makefile("rb").readline().split()[1] == b"408"
